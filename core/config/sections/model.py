"""The sections of a model and of its sharding, with their rules."""

from __future__ import annotations

from core.config import limits
from core.config.frozen import FrozenDict
from core.config.limits import DType
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Open, Section


class ModelConfig(Section):
    path: str = (  # model to start from: hub id (org/name), folder (/... ./... ~/...) or URL
        "~/models/deepseek-llm-7b-chat"  # model to start from: hub id (org/name), folder (/... ./... ~/...) or URL
    )
    tokenizer_path: str | None = None  # hub id or folder of the tokenizer; None: path
    custom_chat_template: str | None = None  # chat template, or the file that has it; None: the tokenizer's own
    external_lib: str | None = None  # modules to import before the model loads, separated by commas
    trust_remote_code: bool = False  # run Python code that comes with the model
    override_config: Open = FrozenDict()  # fields of the model's own configuration
    enable_gradient_checkpointing: bool = True  # recompute activations in the backward pass: less memory, more time
    use_remove_padding: bool = False  # pack the sequences of a pass without padding
    fp32_lm_head: bool = False  # logits in float32 where weights and passes are bfloat16, in learner and engine
    lora_rank: limits.Size = 0  # rank of the adapters that train in place of the weights; 0: all weights train
    lora_alpha: limits.Count = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    # layers with adapters: all-linear, ends of names, or one pattern of whole names
    target_modules: limits.Names = ("all-linear",)
    exclude_modules: limits.Names | None = None  # layers without adapters, written likewise; None: no layer is left out


class FSDPConfig(Section):
    # number format of the passes, whose weights and reductions are float32; None: the policy's, which in one process
    # with the hf engine is the engine's or float32, so that both agree, and bfloat16 elsewhere
    dtype: DType | None = None
    param_offload: bool = False  # keep weights in host memory outside of the phases that need them
    optimizer_offload: bool = False  # keep the optimizer's state in host memory outside of updates
    # keep all of it in host memory always (FSDP2's CPU offload): weights come layer by layer, the CPU takes the steps
    offload_policy: bool = False
    reshard_after_forward: bool = True  # drop gathered weights after a layer's forward pass: less memory, more traffic
    forward_prefetch: bool = False  # gather the next layer's weights while a layer computes
    fsdp_size: limits.OffOrCount = -1  # ranks that share one copy of the state; -1: all


rules = RuleBook()


@rules.problem
def a_model_is_a_hub_id_or_a_path(c: View) -> Broken:
    for name in ("path", "tokenizer_path"):
        if c.no_model(getattr(c.model, name)):
            yield (
                f"actor_rollout_ref.model.{name}",
                "must be a hub id (org/name), a folder that starts with /, . or ~, or a URL (s3://...); write ./ in "
                "front of a relative folder",
            )


@rules.unused
def adapters_that_do_not_train(c: View) -> Unused:
    for section, model in (
        ("actor_rollout_ref.model", c.model),
        ("critic.model", c.critic_model),
    ):
        if not model.lora_rank:
            yield (
                (f"{section}.lora_alpha", f"{section}.target_modules", f"{section}.exclude_modules"),
                f"{section}.lora_rank=0 trains all weights",
            )
