"""Episodes with tools and simulated users: ``multi_turn.enable`` or ``agent_loop=tool_agent``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.config.entries import AgentLoopEntry
from core.config.extensions import Extension
from core.rollout.tools.keys import TOOL_AGENT, ToolKeys, rules

if TYPE_CHECKING:
    from core.config.schema import Config

SECTION = "actor_rollout_ref.rollout.multi_turn"


def _loop(config: Config) -> str | None:
    return TOOL_AGENT if config.actor_rollout_ref.rollout.multi_turn.enable else None


def _files(config: Config) -> Iterator[tuple[str, str]]:
    options = config.actor_rollout_ref.rollout.multi_turn
    for name in ("tool_config_path", "interaction_config_path"):
        if path := getattr(options, name):
            yield f"{SECTION}.{name}", path


EXTENSION = Extension(
    name="tools",
    keys={SECTION: ToolKeys},
    rules=rules,
    derived=(("actor_rollout_ref.rollout.agent_loop", _loop),),
    tables={"agent_loops": {TOOL_AGENT: AgentLoopEntry("core.rollout.tools.tool_agent:ToolAgentLoop")}},
    files=_files,
    functions={"problems_before_start": "core.rollout.tools.template_check:problems_before_start"},
    used=lambda config: config.actor_rollout_ref.rollout.agent_loop == TOOL_AGENT,
)
