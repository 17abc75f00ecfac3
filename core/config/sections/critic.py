"""The section ``critic`` with its rules."""

from __future__ import annotations

from typing import Literal

from core.config import registry, when
from core.config.limits import Count, Names, Positive, Size
from core.config.registry import LossAggMode
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import ARGUMENTS, CODE, CONSENT, Open, Section, execution, files, key
from core.config.sections.actor import Sharing
from core.config.sections.model import FSDPConfig, OptimConfig


class CriticModelConfig(Section):
    path: str | None = files(None, "org/name on the hub or a folder", follows="actor_rollout_ref.model.path")
    external_lib: str | None = key(
        None, "modules to import before the model loads", code=CODE, follows="actor_rollout_ref.model.external_lib"
    )
    trust_remote_code: bool | None = execution(
        None, "run code that comes with the model", code=CONSENT, follows="actor_rollout_ref.model.trust_remote_code"
    )
    override_config: Open | None = key(
        None, "fields of the model's configuration", code=ARGUMENTS, follows="actor_rollout_ref.model.override_config"
    )
    enable_gradient_checkpointing: bool = execution(True, "recompute activations: less memory, more time")
    lora_rank: Size = key(0, "rank of the adapters; 0: all weights train")
    lora_alpha: Count = key(16, "the adapters' output is scaled by lora_alpha / lora_rank", when.ADAPTERS)
    target_modules: Names = key(("all-linear",), "layers with adapters, as of the policy", when.ADAPTERS)
    exclude_modules: Names | None = key(None, "layers without adapters; null: no layer is left out", when.ADAPTERS)
    fsdp_config: FSDPConfig = FSDPConfig()


class CriticConfig(Sharing, Section):
    enable: bool | None = key(None, "train a critic; null: where the estimator reads values")
    strategy: Literal["fsdp", "fsdp2"] = execution("fsdp", "both mean PyTorch's FSDP2", when.OVER_RAY)
    ppo_mini_batch_size: Count | None = key(
        None, "prompts an update", follows="actor_rollout_ref.actor.ppo_mini_batch_size"
    )
    ppo_micro_batch_size_per_gpu: Count | None = execution(
        None, "trajectories of a rank's pass; null: filled by tokens", when.NOT_PACKED
    )
    use_dynamic_bsz: bool | None = execution(None, "fill passes by tokens; null: where no micro-batch size is given")
    ppo_max_token_len_per_gpu: Count = execution(32768, "tokens in one pass, with use_dynamic_bsz", when.PACKED)
    ppo_epochs: Count | None = key(
        None, "times that a step's trajectories are trained on", follows="actor_rollout_ref.actor.ppo_epochs"
    )
    shuffle: bool | None = key(None, "trajectories in a random order", follows="actor_rollout_ref.actor.shuffle")
    data_loader_seed: Size = key(42, "seed of shuffle", when.SHUFFLES)
    cliprange_value: Positive = key(0.5, "how far a value may move from the old one before its loss is clipped")
    loss_agg_mode: LossAggMode | None = key(
        None, "how the losses of tokens become one number", follows="actor_rollout_ref.actor.loss_agg_mode"
    )
    loss_scale_factor: Positive | None = key(
        None, "divisor of seq-mean-token-sum-norm", when.SUM_NORM, follows="actor_rollout_ref.actor.loss_scale_factor"
    )
    grad_clip: Positive = key(1.0, "largest norm of the gradient of an update")
    ulysses_sequence_parallel_size: Count = execution(1, "ranks that share each sequence", when.OVER_RAY)
    tensor_model_parallel_size: Count = execution(
        1, "ranks that share each layer; FSDP2 shards over the others", when.OVER_RAY
    )
    use_torch_compile: bool = execution(False, "compile its MLPs and norms")
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
