"""The defaults that differ from verl v0.6.1's, as data: the README's table is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChangedDefault:
    key: str
    verl: Any
    here: Any
    why: str


CHANGED_DEFAULTS = (
    ChangedDefault(
        "actor_rollout_ref.actor.clip_ratio_low",
        0.2,
        None,
        "clip_ratio sets the bounds that are not given; in verl it is ignored",
    ),
    ChangedDefault("actor_rollout_ref.actor.clip_ratio_high", 0.2, None, "as clip_ratio_low"),
    ChangedDefault(
        "actor_rollout_ref.actor.use_dynamic_bsz",
        False,
        None,
        "True where no micro-batch size is given, instead of an error; it cannot change the result",
    ),
    ChangedDefault("actor_rollout_ref.rollout.name", "vllm", None, "vllm where it is installed, else hf"),
    ChangedDefault(
        "critic.model.path", "~/models/deepseek-llm-7b-chat", None, "the policy's model, of which it is a copy"
    ),
    ChangedDefault("critic.model.override_config", {}, None, "the policy's, as for the path"),
    ChangedDefault(
        "reward_model.model.input_tokenizer",
        "${actor_rollout_ref.model.path}",
        "policy",
        "the same: the policy's; null shows the reward model the policy's token ids",
    ),
    ChangedDefault(
        "trainer.logger", ["console", "wandb"], ["console"], "wandb asks for a login; metrics.jsonl is always written"
    ),
    ChangedDefault("trainer.project_name", "verl_examples", None, "rlrepro-<recipe>"),
    ChangedDefault("trainer.experiment_name", "gsm8k", None, "<model>-seed<seed>: unnamed runs do not share a folder"),
    ChangedDefault(
        "trainer.default_local_dir",
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        None,
        "outputs/<recipe>/<experiment_name>: the whole run is in one folder",
    ),
    ChangedDefault("trainer.device", "cuda", None, "cuda if there is one, else cpu"),
    ChangedDefault("global_profiler.save_path", "outputs/profile", None, "<run folder>/profile"),
    ChangedDefault(
        "algorithm.filter_groups.max_num_gen_batches", 0, 10, "collecting is bounded; 0 has no bound in verl"
    ),
)


def table() -> str:
    """The README's table of changed defaults."""
    rows = [f"| `{d.key}` | `{_shown(d.verl)}` | `{_shown(d.here)}` | {d.why} |" for d in CHANGED_DEFAULTS]
    return "\n".join(["| key | verl | here | why |", "|---|---|---|---|", *rows])


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
