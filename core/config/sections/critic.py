"""The section ``critic`` with its rules."""

from __future__ import annotations

from typing import Literal

from core.config import limits, registry
from core.config.names import LossAggMode
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Open, Section
from core.config.sections.actor import Sharing
from core.config.sections.model import FSDPConfig
from core.config.sections.optim import OptimConfig


class CriticModelConfig(Section):
    path: str | None = None  # org/name on the hub or a folder; None: the policy's
    external_lib: str | None = None  # modules to import before the model loads; None: the policy's
    trust_remote_code: bool | None = None  # run Python code that comes with the model; None: the policy's choice
    override_config: Open | None = None  # fields of the model's own configuration; None: the policy's
    enable_gradient_checkpointing: bool = True  # recompute activations: less memory, more time
    use_remove_padding: bool = False  # pack the sequences of a pass without padding
    lora_rank: limits.Size = 0  # rank of the adapters; 0: all weights train
    lora_alpha: limits.Count = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    target_modules: limits.Names = ("all-linear",)  # layers with adapters, as of the policy
    exclude_modules: limits.Names | None = None  # layers without adapters; None: no layer is left out
    fsdp_config: FSDPConfig = FSDPConfig()


class CriticConfig(Sharing, Section):
    enable: bool | None = None  # train a critic; None: where the estimator reads values
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"  # both mean PyTorch's FSDP2
    ppo_mini_batch_size: limits.Count | None = None  # prompts an update; None: the actor's
    ppo_micro_batch_size_per_gpu: limits.Count | None = None  # trajectories in one pass; None: use_dynamic_bsz decides
    # fill passes up to a number of tokens; None: where no micro-batch size is given
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: limits.Count = 32768  # tokens in one pass, with use_dynamic_bsz
    ppo_epochs: limits.Count | None = None  # times that a step's trajectories are trained on; None: the actor's
    shuffle: bool | None = None  # trajectories in a random order; None: the actor's choice
    data_loader_seed: limits.Size = 42  # seed of shuffle
    cliprange_value: limits.Positive = 0.5  # how far a value may move from the old one before its loss is clipped
    loss_agg_mode: LossAggMode | None = None  # how the losses of tokens become one number; None: the actor's
    loss_scale_factor: limits.Positive | None = None  # divisor of seq-mean-token-sum-norm; None: the actor's
    grad_clip: limits.Positive = 1.0  # largest norm of the gradient of an update
    ulysses_sequence_parallel_size: limits.Count = 1  # ranks that share each sequence
    tensor_model_parallel_size: limits.Count = 1  # ranks that share each layer's matrices; FSDP2 shards over the others
    use_torch_compile: bool = False  # compile its MLPs and norms
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)


rules = RuleBook()


@rules.problem
def the_critic(c: View) -> Broken:
    if c.critic.enable != c.estimator.critic:
        with_critic = ", ".join(name for name, entry in registry.ESTIMATORS.items() if entry.critic)
        yield (
            "critic.enable",
            f"algorithm.adv_estimator={c.algorithm.adv_estimator} decides: there is a critic with "
            f"{with_critic}, and with no other; leave it out",
        )
    if (
        c.critic.enable
        and c.trainer.total_training_steps is not None
        and c.trainer.critic_warmup >= c.trainer.total_training_steps
    ):
        yield (
            "trainer.critic_warmup",
            f"leaves no step of trainer.total_training_steps={c.trainer.total_training_steps} to the policy; "
            "shorten it",
        )
    if c.critic.model.path != c.model.path and c.no_model(c.critic.model.path):
        yield (
            "critic.model.path",
            "must be a hub id (org/name), a folder that starts with /, . or ~, or a URL (s3://...); write ./ in "
            "front of a relative folder, or leave it out for the policy's",
        )


@rules.unused
def no_critic(c: View) -> Unused:
    if not c.critic.enable:
        yield (
            ("critic.*", "trainer.critic_warmup"),
            f"algorithm.adv_estimator={c.algorithm.adv_estimator} has no critic",
        )
