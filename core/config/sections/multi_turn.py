"""The section ``actor_rollout_ref.rollout.multi_turn`` with its rules: episodes, and the tool agent."""

from __future__ import annotations

from typing import Literal

from core.config import limits
from core.config.registry import TOOL_AGENT
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Section


class MultiTurnConfig(Section):
    """Limits are those of an episode, which core/rollout/tool_agent.py plays."""

    enable: bool = False  # trajectories are episodes in which the policy calls tools
    max_assistant_turns: limits.Count | None = None  # turns of the policy; None: until the response is full
    max_user_turns: limits.Count | None = None  # turns in which tools or a user answer; None: no limit of its own
    max_tool_calls: limits.Count | None = None  # tool calls of an episode; None: no limit of its own
    max_parallel_calls: limits.Count = 1  # calls of one turn; those beyond are not made
    tool_config_path: str | None = None  # YAML file with the tools, see core/rollout/tools.py
    # YAML file with simulated users, see core/rollout/users.py
    interaction_config_path: str | None = None
    tool_timeout_s: limits.Positive = 30.0  # seconds a tool call or a user's turn may take; a tool may have its own
    max_tool_response_length: limits.Count = 256  # characters of a tool's answer that are kept
    # the part of a tool's answer that is kept, as verl has it
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    format: Literal["hermes", "react"] = "hermes"  # how a tool call is written
    repeatable: bool = False  # decoding waits for tools, so that a run repeats to the bit also with slow ones


rules = RuleBook()


@rules.problem
def the_tool_agent(c: View) -> Broken:
    options = c.rollout.multi_turn
    if options.enable and c.rollout.agent_loop != TOOL_AGENT:
        yield (
            "actor_rollout_ref.rollout.agent_loop",
            "and multi_turn.enable=True, which is the tool agent, both say how an episode goes; leave one out",
        )
    if c.rollout.agent_loop == TOOL_AGENT and not (options.tool_config_path or options.interaction_config_path):
        yield (
            "actor_rollout_ref.rollout.multi_turn.tool_config_path",
            "or interaction_config_path is needed by the tool agent (multi_turn.enable=True or "
            "agent_loop=tool_agent); name a YAML file with tools (core/rollout/tools.py says what it holds)",
        )


@rules.problem
def episodes_repeat(c: View) -> Broken:
    if c.rollout.multi_turn.repeatable and not c.engine.seeded and c.config.needs_engine:
        yield (
            "actor_rollout_ref.rollout.multi_turn.repeatable",
            f"{c.rollout.name} draws no answer from a seed, so that a run cannot be repeated; set False, or "
            "actor_rollout_ref.rollout.name=hf",
        )


@rules.unused
def episodes_of_one_turn(c: View) -> Unused:
    if c.rollout.agent_loop in (None, "single_turn_agent"):
        yield (
            ("actor_rollout_ref.rollout.multi_turn.*", "actor_rollout_ref.actor.state_masking"),
            "a trajectory is one turn, unless the data's column agent_name names another loop: neither agent_loop "
            "nor multi_turn.enable is set to one of several turns",
        )
    if c.rollout.name != "hf" or c.trainer.backend != "local":
        yield (
            ("actor_rollout_ref.rollout.multi_turn.repeatable",),
            "only an engine in this process waits for tools",
        )
