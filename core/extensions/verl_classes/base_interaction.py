"""verl's ``BaseInteraction``, and what lets a class on it play the user in episodes here."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from core.extensions.verl_classes.base_tool import accepted, awaited
from core.rollout.tools.interactions import Interaction, UserTurn


class BaseInteraction:
    """The base class of simulated users that were written for verl."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        return None


class UserState(NamedTuple):
    """An episode: the id under which the class keeps it, and the example's ``interaction_kwargs``."""

    instance_id: str
    facts: dict[str, Any]


class VerlInteraction(Interaction):
    """A simulated user of the tool agent that a class on verl's ``BaseInteraction`` plays."""

    def __init__(self, kind: type, config: Mapping[str, Any]):
        self.user = kind(dict(config))
        self.name = config["name"]  # the YAML file's, which verl passes with an example's facts

    async def start(self, facts: Mapping[str, Any]) -> UserState:
        start, instance_id = self.user.start_interaction, str(uuid.uuid4())
        started = await awaited(start(instance_id, **accepted(start, {"name": self.name}), **facts))
        return UserState(started if isinstance(started, str) else instance_id, dict(facts))

    async def generate_response(self, state: UserState, messages: Sequence[Mapping[str, Any]]) -> UserTurn:
        """Return the class's reply. ``calculate_score`` is called by classes themselves, as it is under verl."""
        respond, chat = self.user.generate_response, [dict(message) for message in messages]
        facts = accepted(respond, {"name": self.name, **state.facts})
        by_place = list(inspect.signature(respond).parameters)[:2]  # a fact of the same name would be given twice
        facts = {name: fact for name, fact in facts.items() if name not in by_place}
        reply = await awaited(respond(state.instance_id, chat, **facts))
        over, text, score = reply[:3]
        return UserTurn(bool(over), text, 0.0 if score is None else score, scored=score is not None)

    async def finalize(self, state: UserState) -> None:
        finalize = self.user.finalize_interaction
        takes_id = any(one.kind is not one.VAR_KEYWORD for one in inspect.signature(finalize).parameters.values())
        await awaited(finalize(*([state.instance_id] if takes_id else [])))


METHODS = ("start_interaction", "generate_response")


def adapt(kind: Any) -> Callable[[str, Mapping[str, Any]], VerlInteraction] | None:
    """Return what makes a user whom a class on verl's base plays, or None for another class."""
    if not (isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in METHODS)):
        return None
    return lambda name, config: VerlInteraction(kind, {**config, "name": name})
