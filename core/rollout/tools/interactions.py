"""Simulated users (``multi_turn.interaction_config_path``): what one is, and the YAML file that lists them.

The file is verl's::

    interaction:
      - name: checker                                 # optional: else the class's in lower case, without Interaction
        class_name: path/to/file.py:Checker           # or package.module:Checker, or verl's package.module.Checker
        config: {}                                    # for the class

An example chooses its user, ``extra_info.interaction_kwargs: {name: checker, ...}``; what else stands there are the
user's facts. A turn in which the policy calls no tool goes to that user, who ends the episode or answers it. Scores of
the user's turns reach the scorer in ``extra_info["rollout"]["user_scores"]``. An example without
``interaction_kwargs`` is one without a user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from core.config import extensions
from core.rollout.tools.tools import load_class, made_by_name, read_entries

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


@dataclass(frozen=True)
class UserTurn:
    """What a user answers: whether the episode ends, the text of their turn otherwise, and a score of the policy's."""

    over: bool
    text: str = ""
    score: float = 0.0
    scored: bool = True  # False: the policy's turn has no score, not even 0


class Interaction:
    """A simulated user. One object serves all episodes of a run, many at a time: what is an episode's is in its state.

    ``config`` is the file's. Raises ValueError for what it cannot mean. ``runs_apart`` is that of
    :class:`core.rollout.tools.tools.Tool`: False where no method ever blocks.
    """

    runs_apart = True

    def __init__(self, config: Mapping[str, Any]):
        if config:
            raise ValueError(f"{type(self).__name__} has no option {', '.join(map(repr, config))}")

    async def start(self, facts: Mapping[str, Any]) -> Any:
        """Return the state of a new episode. ``facts`` are the example's ``interaction_kwargs``, its name left out."""
        return dict(facts)

    async def generate_response(self, state: Any, messages: Sequence[Mapping[str, Any]]) -> UserTurn:
        """Return the user's reply. ``messages`` are the prompt's and all since, of roles assistant, tool and user.

        A function of its arguments, if a run is to be replayed. Where it raises, or returns what is no UserTurn, the
        policy reads an error in its place, and ``agent/user_failures`` counts it.
        """
        raise NotImplementedError

    async def finalize(self, state: Any) -> None:
        """Let go of an episode's state. Called once for each that :meth:`start` returned, however the episode ends."""

    def close(self) -> None:
        """Let go of what the object holds."""


def reply_problem(reply: Any) -> str | None:
    """Return what is wrong with what a user's ``generate_response`` returned, or None."""
    if not isinstance(reply, UserTurn):
        return f"the user returned {type(reply).__name__}, not a UserTurn"
    if not isinstance(reply.score, Real) or not math.isfinite(reply.score):
        return "the user returned a score that is no finite number"
    if not (reply.over or isinstance(reply.text, str)):
        return f"the user returned {type(reply.text).__name__}, not text"
    return None


def load_interactions(path: str | Path) -> dict[str, Interaction]:
    """Return name -> user, in the file's order. Raises InputError with every problem of the file."""
    return made_by_name(*read_entries(path, KEY, "interaction"), "user", _user)


def check_interactions(path: str | Path) -> None:
    """Check the file and its classes, and make no user. Raises InputError with every problem."""
    made_by_name(*read_entries(path, KEY, "interaction"), "user", lambda entry: (_user(entry)[0], lambda: None))


def _user(entry: Any) -> tuple[str, Callable[[], Interaction]]:
    if not isinstance(entry, Mapping) or not {"class_name"} <= entry.keys() <= {"name", "class_name", "config"}:
        raise ValueError("must hold class_name, and may hold name and config")
    kind, config = load_class(entry["class_name"]), dict(entry.get("config") or {})
    name = str(entry.get("name") or kind.__name__.removesuffix("Interaction").lower())
    if isinstance(kind, type) and issubclass(kind, Interaction):
        return name, lambda: kind(config)
    for adapter_of in extensions.functions("foreign_user"):
        if (make := adapter_of(kind)) is not None:
            return name, lambda: make(name, config)
    raise ValueError(f"{kind.__name__} does not extend core.rollout.tools.interactions.Interaction")


def chosen_user(
    users: Mapping[str, Interaction], extra_info: Mapping[str, Any]
) -> tuple[Interaction, dict[str, Any]] | None:
    """Return an example's user and their facts, or None. Raises ValueError for a user whom the file does not have."""
    kwargs = extra_info.get("interaction_kwargs")
    if kwargs is None:
        return None
    if not users:
        raise ValueError(f"extra_info.interaction_kwargs chooses a user, and {KEY} is not set")
    if not isinstance(kwargs, Mapping) or kwargs.get("name") not in users:
        name = kwargs.get("name") if isinstance(kwargs, Mapping) else kwargs
        raise ValueError(f"extra_info.interaction_kwargs chooses {name!r}; {KEY} has {', '.join(users)}")
    return users[kwargs["name"]], {key: value for key, value in kwargs.items() if key != "name"}
