"""Simulated users (``multi_turn.interaction_config_path``): their base class, and the YAML file that lists them.

A user has the methods of verl's ``BaseInteraction``. The file is verl's::

    interaction:
      - name: checker                                 # optional: else the class's in lower case, without Interaction
        class_name: path/to/file.py:Checker           # or package.module.Checker
        config: {}                                    # for the class

An example chooses its user, ``extra_info.interaction_kwargs: {name: checker, ...}``; what else stands there are the
user's facts. A turn in which the policy calls no tool goes to that user, who ends the episode or answers it. Scores of
the user's turns reach the scorer in ``extra_info["rollout"]["user_scores"]``. An example without
``interaction_kwargs`` is one without a user.
"""

from __future__ import annotations

import copy
import inspect
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from core.rollout.tools import accepted, awaited, load_class, made_by_name, read_entries

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
METHODS = ("start_interaction", "generate_response")  # a class with these is a user, on BaseInteraction or verl's base


class UserTurn(NamedTuple):
    """What a user answers: whether the episode ends, the text of their turn otherwise, and a score of the policy's."""

    over: bool
    text: str = ""
    score: float | None = None


class BaseInteraction:
    """A simulated user. One object serves all episodes of a run, many at a time: keep an episode's state by its id.

    ``runs_apart`` is that of :class:`core.rollout.tools.BaseTool`: False where no method ever blocks.
    """

    runs_apart = True

    def __init__(self, config: dict[str, Any]):
        """``config`` is the file's, with the user's name. Raises ValueError for what it cannot mean."""
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode; return its id. ``kwargs`` are the example's ``interaction_kwargs``."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Return whether the episode ends, the user's text, a score of the policy's turn or None, and metrics.

        ``messages`` are the prompt's and all since, of roles assistant, tool and user; ``kwargs`` the example's facts.
        Where it raises, or returns what is no reply, the policy reads an error in its place, and
        ``agent/user_failures`` counts it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """Return a score; only a class's own methods call it."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of an episode's state. Called once for each that began, however the episode ends."""

    def close(self) -> None:
        """Let go of what the object holds."""


class UserInEpisode:
    """A user in one episode: their methods called as verl calls them, with the example's ``facts``."""

    def __init__(self, user: Any, name: str, facts: Mapping[str, Any]):
        self.user, self.facts, self.id = user, {"name": name, **facts}, str(uuid.uuid4())

    def _facts_for(self, method: Callable[..., Any], by_place: int) -> dict[str, Any]:
        by_place = list(inspect.signature(method).parameters)[:by_place]  # a fact of that name would be given twice
        return {name: fact for name, fact in accepted(method, self.facts).items() if name not in by_place}

    async def start(self) -> None:
        self.facts = copy.deepcopy(self.facts)  # a user may change what it is given
        start = self.user.start_interaction
        started = await awaited(start(self.id, **self._facts_for(start, 1)))
        self.id = started if isinstance(started, str) else self.id

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> UserTurn:
        """Return the reply. Raises ValueError for what is none."""
        respond, chat = self.user.generate_response, [dict(message) for message in messages]
        reply = await awaited(respond(self.id, chat, **self._facts_for(respond, 2)))
        if not isinstance(reply, tuple) or len(reply) < 3:
            raise ValueError(f"it returned {type(reply).__name__}, not (whether it ends, text, score, metrics)")
        over, text, score = reply[:3]
        if score is not None and not (isinstance(score, Real) and math.isfinite(score)):
            raise ValueError(f"it returned the score {score!r:.60}, which is no finite number")
        if not (over or isinstance(text, str)):
            raise ValueError(f"it returned {type(text).__name__}, not text")
        return UserTurn(bool(over), text, None if score is None else float(score))

    async def finalize(self) -> None:
        finalize = getattr(self.user, "finalize_interaction", None)
        if finalize is not None:
            takes_id = any(one.kind is not one.VAR_KEYWORD for one in inspect.signature(finalize).parameters.values())
            await awaited(finalize(*([self.id] if takes_id else [])))


def load_users(path: str | Path) -> dict[str, Any]:
    """Return name -> user, in the file's order. Raises InputError with every problem of the file."""
    return made_by_name(*read_entries(path, KEY, "interaction"), "user", lambda entry: _user(entry, Path(path)))


def check_users(path: str | Path) -> None:
    """Check the file and its classes, and make no user. Raises InputError with every problem."""

    def named(entry: Any) -> tuple[str, Callable[[], None]]:
        return _user(entry, Path(path))[0], lambda: None

    made_by_name(*read_entries(path, KEY, "interaction"), "user", named)


def _user(entry: Any, file: Path) -> tuple[str, Callable[[], Any]]:
    if not isinstance(entry, Mapping) or not {"class_name"} <= entry.keys() <= {"name", "class_name", "config"}:
        raise ValueError("must hold class_name, and may hold name and config")
    kind = load_class(entry["class_name"], file)
    if not (isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in METHODS)):
        raise ValueError(f"{entry['class_name']} does not extend core.rollout.users.BaseInteraction")
    name = str(entry.get("name") or kind.__name__.removesuffix("Interaction").lower())
    return name, lambda: kind({**dict(entry.get("config") or {}), "name": name})


def chosen_user(users: Mapping[str, Any], extra_info: Mapping[str, Any]) -> UserInEpisode | None:
    """Return an example's user, or None. Raises ValueError for a user whom the file does not have."""
    kwargs = extra_info.get("interaction_kwargs")
    if kwargs is None:
        return None
    if not users:
        raise ValueError(f"extra_info.interaction_kwargs chooses a user, and {KEY} is not set")
    if not isinstance(kwargs, Mapping) or kwargs.get("name") not in users:
        name = kwargs.get("name") if isinstance(kwargs, Mapping) else kwargs
        raise ValueError(f"extra_info.interaction_kwargs chooses {name!r}; {KEY} has {', '.join(users)}")
    name = kwargs["name"]
    return UserInEpisode(users[name], name, {key: value for key, value in kwargs.items() if key != "name"})
