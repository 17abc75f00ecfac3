"""Keys of verl's SFT trainers whose meaning depends on the rest of the line.

See core/config/verl_names.py.
"""

from __future__ import annotations

from typing import Any

from core.config.training_keys import ACTOR
from core.config.verl_names import (
    Conversion,
    Interpretation,
    Line,
    over_all_ranks,
    whole_number,
)

OPTIM = f"{ACTOR}.optim"
# Defaults of verl's later trainer, with the names under which a line may set each itself
LATER = {
    "lr_scheduler_type": ("constant", ("optim.lr_scheduler", "optim.warmup_style")),
    "lr_warmup_steps_ratio": (0.0, ("optim.warmup_steps_ratio",)),
    "betas": ([0.9, 0.999], ()),
}


def length(key: str, value: Any, line: Line) -> Interpretation | None:
    """Read the bound of a demonstration, which here is that of prompt and response together."""
    if not whole_number(value) or value < 2:
        return None
    prompt = value // 2
    return Interpretation(
        {"data.max_prompt_length": prompt, "data.max_response_length": value - prompt}
    )


def field_of_a_column(key: str, value: Any, line: Line) -> Interpretation | None:
    """Read ``prompt_key=extra_info prompt_dict_keys=[question]`` as its ``extra_info.question``."""
    name = key.replace("_dict_keys", "_key")
    fields = value if isinstance(value, list) else [value]
    default = {"data.prompt_key": "question", "data.response_key": "answer"}[name]
    column = line.words.get(name, default)
    if len(fields) != 1 or not isinstance(column, str):
        return None
    return Interpretation({name: f"{column}.{fields[0]}"}, replaces=True)


def later_trainer(target: str = "", only: Any = None) -> Conversion:
    """Return the conversion of a key of verl's later trainer, which sets that one's defaults too.

    ``target`` is the key here; without one the key means nothing more. ``only`` is its one value
    that can be read.
    """

    def with_its_defaults(key: str, value: Any, line: Line) -> Interpretation | None:
        if only not in (None, value):
            return None
        settings = {target: value} if target else {}
        if "model.partial_pretrain" not in line.words:
            for name, (default, others) in LATER.items():
                typed_as = {f"optim.{name}", f"{OPTIM}.{name}", *others}
                if not typed_as & line.words.keys():
                    settings.setdefault(f"{OPTIM}.{name}", default)
        return Interpretation(settings, "" if settings else "the one that is here")

    return with_its_defaults


CONVERSIONS = {
    "data.max_length": length,
    "data.micro_batch_size": over_all_ranks(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
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
