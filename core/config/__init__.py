"""The configuration of a run: composed, checked as a whole, typed and immutable.

config = compose("grpo", ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"])
config.actor_rollout_ref.rollout.n

The names below are loaded when they are first used: a learner rank that reads a table of names or a bound imports
that module alone, not the whole of composing and checking.
"""

from typing import Any

__all__ = [
    "Composed",
    "Config",
    "compose",
    "diff",
    "examine",
    "from_yaml",
    "to_yaml",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from core.config import checked

    return getattr(checked, name)
