"""Keys of verl's SFT trainers whose meaning depends on the rest of the line (see core/config/verl_names.py)."""

from __future__ import annotations

from typing import Any

from core.config.verl_names import Composed, Interpretation, over_all_ranks, whole_number

OPTIM = "actor_rollout_ref.actor.optim"


def length(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Read the bound of a whole demonstration, which here is that of prompt and response together."""
    if not whole_number(value) or value < 2:
        return None
    return Interpretation(
        settings={"data.max_prompt_length": value // 2, "data.max_response_length": value - value // 2}
    )


def field_of_a_column(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Read ``prompt_key=extra_info prompt_dict_keys=[question]`` as ``prompt_key=extra_info.question``."""
    name = key.replace("_dict_keys", "_key")
    fields = value if isinstance(value, list) else [value]
    column = line.words.get(name, {"data.prompt_key": "question", "data.response_key": "answer"}[name])
    if len(fields) != 1 or not isinstance(column, str):
        return None
    line.words[name] = f"{column}.{fields[0]}"
    return Interpretation(settings={name: f"{column}.{fields[0]}"})


def engines_optimizer(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Read the choice of the later trainer's optimizer, whose schedule is another than the earlier trainer's."""
    if value != "fsdp":
        return None
    schedule = {"lr_scheduler_type": "constant", "lr_warmup_steps_ratio": 0.0, "betas": [0.9, 0.999]}
    names = {"lr_scheduler_type": ("optim.lr_scheduler_type", "optim.warmup_style")}
    missing = {
        name: default
        for name, default in schedule.items()
        if not {*names.get(name, (f"optim.{name}",)), f"{OPTIM}.{name}"} & line.words.keys()
    }
    if not missing:
        return Interpretation(unused="AdamW is the optimizer here")
    return Interpretation(settings={f"{OPTIM}.{name}": default for name, default in missing.items()})


CONVERSIONS = {
    "data.max_length": length,
    "data.micro_batch_size": over_all_ranks("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    "data.prompt_dict_keys": field_of_a_column,
    "data.response_dict_keys": field_of_a_column,
    "optim": engines_optimizer,
}
