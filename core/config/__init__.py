"""The configuration of a run: composed, checked as a whole, typed and immutable.

config = compose("grpo", ["data.train_batch_size=64",
"actor_rollout_ref.actor.ppo_mini_batch_size=64"]) config.actor_rollout_ref.rollout.n

The names below are loaded when they are first used: a learner rank that reads a table of names or a
bound imports that module alone, not the whole of composing and checking.
"""

import importlib
from typing import Any

_MODULES = {
    **dict.fromkeys(("compose", "examine"), "composition"),
    **{"Composed": "composition", "Config": "schema", "to_yaml": "convert"},
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"core.config.{_MODULES[name]}"), name)
