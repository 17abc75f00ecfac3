"""Keys of verl's SFT trainers whose meaning depends on the rest of the line (see
core/config/verl_names.py)."""

from __future__ import annotations

from typing import Any

from core.config.verl_names import (
    ACTOR,
    Composed,
    Conversion,
    Interpretation,
    over_all_ranks,
    whole_number,
)

OPTIM = f"{ACTOR}.optim"
LATER = {"lr_scheduler_type": "constant", "lr_warmup_steps_ratio": 0.0, "betas": [0.9, 0.999]}


def length(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Read the bound of a whole demonstration, which here is that of prompt and response
    together."""
    if not whole_number(value) or value < 2:
        return None
    return Interpretation(
        settings={
            "data.max_prompt_length": value // 2,
            "data.max_response_length": value - value // 2,
        }
    )


def field_of_a_column(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Read ``prompt_key=extra_info prompt_dict_keys=[question]`` as
    ``prompt_key=extra_info.question``."""
    name = key.replace("_dict_keys", "_key")
    fields = value if isinstance(value, list) else [value]
    column = line.words.get(
        name, {"data.prompt_key": "question", "data.response_key": "answer"}[name]
    )
    if len(fields) != 1 or not isinstance(column, str):
        return None
    line.words[name] = f"{column}.{fields[0]}"
    return Interpretation(settings={name: f"{column}.{fields[0]}"})


def later_trainer(target: str = "", only: Any = None) -> Conversion:
    """Return the conversion of a key that verl's later trainer has: what the line leaves out gets
    that one's defaults.

    ``target`` is the key here; without one the key says nothing more. ``only`` is its one value
    that can be read.
    """

    def with_its_defaults(key: str, value: Any, line: Composed) -> Interpretation | None:
        if only not in (None, value):
            return None
        settings = {target: value} if target else {}
        read = [name for _, found in line.read.values() for name in found]
        for name, default in LATER.items() if "model.partial_pretrain" not in line.words else ():
            others = (
                ("optim.lr_scheduler", "optim.warmup_style") if name == "lr_scheduler_type" else ()
            )
            others += ("optim.warmup_steps_ratio",) if name == "lr_warmup_steps_ratio" else ()
            names = {f"optim.{name}", f"{OPTIM}.{name}", *others}
            if not names & line.words.keys() and f"{OPTIM}.{name}" not in read:
                settings[f"{OPTIM}.{name}"] = default
        return Interpretation(settings, "" if settings else "the one that is here")

    return with_its_defaults


CONVERSIONS = {
    "data.max_length": length,
    "data.micro_batch_size": over_all_ranks("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    "data.prompt_dict_keys": field_of_a_column,
    "data.response_dict_keys": field_of_a_column,
    "data.pad_mode": later_trainer(),
    "engine": later_trainer(only="fsdp"),
    "engine.fsdp_size": later_trainer(f"{ACTOR}.fsdp_config.fsdp_size"),
    "engine.strategy": later_trainer(f"{ACTOR}.strategy"),
    "engine.ulysses_sequence_parallel_size": later_trainer(
        f"{ACTOR}.ulysses_sequence_parallel_size"
    ),
    "model.path": later_trainer("actor_rollout_ref.model.path"),
    "optim": later_trainer(only="fsdp"),
    "optim.lr_warmup_steps_ratio": later_trainer(f"{OPTIM}.lr_warmup_steps_ratio"),
}
