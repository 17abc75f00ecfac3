"""The sections of a model, of its sharding and of its optimizer, with their rules."""

from __future__ import annotations

from typing import Literal

from core.config import when
from core.config.limits import Betas, Count, DType, Names, NonNegative, OffOrCount, OffOrSize, Positive, Share, Size
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import ARGUMENTS, CODE, CONSENT, FrozenDict, Open, Section, execution, files, key


class OptimConfig(Section):
    lr: NonNegative = key(1e-6, "learning rate after the warm-up")
    weight_decay: NonNegative = key(0.01, "of AdamW")
    betas: Betas = key((0.9, 0.999), "of AdamW")
    lr_warmup_steps: OffOrSize = key(-1, "RL steps of warm-up; -1: lr_warmup_steps_ratio decides")
    lr_warmup_steps_ratio: Share = key(0.0, "warm-up as a share of the run's RL steps", when.BY_RATIO)
    lr_scheduler_type: Literal["constant", "cosine"] = key("constant", "learning rate after the warm-up")
    min_lr_ratio: Share | None = key(0.0, "where a cosine ends, as a share of lr; null: 0", when.COSINE)
    num_cycles: Positive = key(0.5, "waves of a cosine; 0.5 falls from lr to its end once", when.COSINE)


class ModelConfig(Section):
    path: str = files(
        "~/models/deepseek-llm-7b-chat", "model to start from: hub id (org/name), folder (/, ./, ~/) or URL"
    )
    tokenizer_path: str | None = key(None, "hub id or folder of the tokenizer; null: path")
    custom_chat_template: str | None = key(None, "chat template, or the file that has it; null: the tokenizer's own")
    external_lib: str | None = key(None, "modules to import before the model loads, separated by commas", code=CODE)
    trust_remote_code: bool = execution(False, "run Python code that comes with the model", code=CONSENT)
    override_config: Open = key(FrozenDict(), "fields of the model's own configuration", code=ARGUMENTS)
    enable_gradient_checkpointing: bool = execution(True, "recompute activations: less memory, more time")
    lora_rank: Size = key(0, "rank of the adapters that train in place of the weights; 0: all weights train")
    lora_alpha: Count = key(16, "the adapters' output is scaled by lora_alpha / lora_rank", when.ADAPTERS)
    target_modules: Names = key(
        ("all-linear",), "all-linear, ends of layers' names, or one pattern of names", when.ADAPTERS
    )
    exclude_modules: Names | None = key(None, "layers without adapters, written likewise; null: none", when.ADAPTERS)


class FSDPConfig(Section):
    dtype: DType | None = key(
        None,
        "number format of the passes, whose weights and reductions are float32; the policy's is bfloat16 by default, "
        "and in one process with the hf engine the engine's or float32, so that both agree",
        follows="actor_rollout_ref.actor.fsdp_config.dtype",
    )
    param_offload: bool = execution(
        False, "keep weights in host memory outside of the phases that need them", when.OVER_RAY
    )
    optimizer_offload: bool = execution(
        False, "keep the optimizer's state in host memory outside of updates", when.OVER_RAY
    )
    offload_policy: bool = execution(False, "keep all of it in host memory; the CPU takes the steps", when.OVER_RAY)
    reshard_after_forward: bool = execution(True, "drop gathered weights after a layer's forward pass", when.OVER_RAY)
    forward_prefetch: bool = execution(False, "gather the next layer's weights while a layer computes", when.OVER_RAY)
    fsdp_size: OffOrCount = execution(-1, "ranks that share one copy of the state; -1: all", when.OVER_RAY)


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


@rules.problem
def schedules_have_an_end(c: View) -> Broken:
    for section, part, runs in (
        ("actor_rollout_ref.actor", c.actor, True),
        ("critic", c.critic, c.critic.enable),
    ):
        if part.optim.lr_scheduler_type == "cosine" and runs and c.open_length:
            yield (
                f"{section}.optim.lr_scheduler_type",
                "needs the number of training steps, which filtering leaves open; set trainer.total_training_steps",
            )
        if part.optim.lr_warmup_steps < 0 and part.optim.lr_warmup_steps_ratio > 0 and runs and c.open_length:
            yield (
                f"{section}.optim.lr_warmup_steps_ratio",
                "needs the number of training steps, which filtering leaves open; set trainer.total_training_steps, "
                "or give lr_warmup_steps",
            )
        if runs and c.trainer.total_training_steps and part.optim.lr_warmup_steps > c.trainer.total_training_steps:
            yield (
                f"{section}.optim.lr_warmup_steps",
                f"is longer than the run of trainer.total_training_steps={c.trainer.total_training_steps}; shorten "
                "the warm-up (it counts RL steps, not optimizer steps)",
            )
