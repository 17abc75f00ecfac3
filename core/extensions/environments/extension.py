"""Environments of the package ``verifiers``: ``agent_loop=verifiers`` with ``multi_turn.environment``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from core.config.entries import AgentLoopEntry
from core.config.extensions import Extension
from core.config.frozen import FrozenDict
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Open, Section

if TYPE_CHECKING:
    from core.config.schema import Config

SECTION = "actor_rollout_ref.rollout.multi_turn"
LOOP = "verifiers"


class EnvironmentKeys(Section):
    # of agent_loop=verifiers: an installed environment's name, or a file with load_environment
    environment: str | None = None
    environment_args: Open = FrozenDict()  # arguments of its load_environment


rules = RuleBook()


@rules.problem
def an_environment(c: View) -> Broken:
    if c.rollout.agent_loop == LOOP and not c.rollout.multi_turn.environment:
        yield (
            f"{SECTION}.environment",
            "is needed by agent_loop=verifiers; name an installed environment, or a file with load_environment",
        )


@rules.unused
def without_the_loop(c: View) -> Unused:
    if c.rollout.agent_loop not in (None, LOOP, "single_turn_agent"):
        yield (
            (f"{SECTION}.environment", f"{SECTION}.environment_args*"),
            f"agent_loop={c.rollout.agent_loop} plays none; set actor_rollout_ref.rollout.agent_loop=verifiers",
        )


def problems_before_start(config: Config) -> list[str]:
    """Return that the package is not installed, where it is not."""
    loop = "actor_rollout_ref.rollout.agent_loop=verifiers"
    missing = find_spec("verifiers") is None
    return [f"{loop}: verifiers is not installed; pip install 'rlrepro[verifiers]'"] if missing else []


def _files(config: Config) -> Iterator[tuple[str, str]]:
    path = config.actor_rollout_ref.rollout.multi_turn.environment or ""
    if path.endswith(".py"):
        yield f"{SECTION}.environment", path


EXTENSION = Extension(
    name="environments",
    keys={SECTION: EnvironmentKeys},
    rules=rules,
    files=_files,
    tables={"agent_loops": {LOOP: AgentLoopEntry("core.extensions.environments.environment_loop:EnvironmentLoop")}},
    functions={"problems_before_start": "core.extensions.environments.extension:problems_before_start"},
    used=lambda config: config.actor_rollout_ref.rollout.agent_loop == LOOP,
)
