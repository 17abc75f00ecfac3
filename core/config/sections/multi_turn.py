"""The section ``actor_rollout_ref.rollout.multi_turn`` with its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from core.config import limits, registry
from core.config.rulebook import Broken, RuleBook, Unused
from core.config.section import Section

if TYPE_CHECKING:
    from core.config.view import View


class MultiTurnConfig(Section):
    """The tool agent of core/extensions/tools/tool_agent.py. Limits are those of an episode."""

    enable: bool = False  # trajectories are episodes in which the policy calls tools
    max_assistant_turns: limits.Count | None = (  # turns of the policy; None: until the response is full
        None  # turns of the policy in an episode; None: until the response is full
    )
    max_user_turns: limits.Count | None = None  # turns in which tools or a user answer; None: no limit of its own
    max_tool_calls: limits.Count | None = None  # tool calls of an episode; None: no limit of its own
    max_parallel_calls: limits.Count = 1  # calls of one turn; those beyond are not made
    tool_config_path: str | None = None  # YAML file with the tools, see core/extensions/tools/tools.py
    interaction_config_path: str | None = (
        None  # YAML file with simulated users, see core/extensions/tools/interactions.py
    )
    tool_timeout_s: limits.Positive = 30.0  # seconds a tool call or a user's turn may take; a tool may have its own
    max_tool_response_length: limits.Count = 256  # characters of a tool's answer that are kept
    # the part of a tool's answer that is kept, as verl has it
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    format: Literal[*registry.CALL_FORMATS] = "hermes"  # how a tool call is written
    repeatable: bool = False  # decoding waits for tools, so that a run repeats to the bit also with slow ones


rules = RuleBook()


@rules.problem
def the_tool_agent(c: View) -> Broken:
    if c.rollout.loop == "tool_agent" and (
        not (c.rollout.multi_turn.tool_config_path or c.rollout.multi_turn.interaction_config_path)
    ):
        yield (
            "actor_rollout_ref.rollout.multi_turn.tool_config_path",
            "or interaction_config_path is needed by the tool agent (multi_turn.enable=True or "
            "agent_loop=tool_agent); name a YAML file with tools (core/extensions/tools/tools.py says what it holds)",
        )
    if c.rollout.multi_turn.repeatable and not c.engine.seeded and c.config.needs_engine:
        yield (
            "actor_rollout_ref.rollout.multi_turn.repeatable",
            f"{c.rollout.name} draws no answer from a seed, so that a run cannot be repeated; set False, or "
            "actor_rollout_ref.rollout.name=hf",
        )


@rules.unused
def episodes_of_one_turn(c: View) -> Unused:
    if c.rollout.loop in (None, "single_turn_agent"):
        yield (
            (
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
                "actor_rollout_ref.rollout.multi_turn.max_user_turns",
                "actor_rollout_ref.rollout.multi_turn.max_tool_calls",
                "actor_rollout_ref.rollout.multi_turn.max_parallel_calls",
                "actor_rollout_ref.rollout.multi_turn.tool_config_path",
                "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
                "actor_rollout_ref.rollout.multi_turn.format",
                "actor_rollout_ref.rollout.multi_turn.tool_timeout_s",
                "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
                "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side",
                "actor_rollout_ref.rollout.multi_turn.repeatable",
                "actor_rollout_ref.actor.state_masking",
            ),
            "a trajectory is one turn, unless the data's column agent_name names another loop: neither "
            "agent_loop nor multi_turn.enable is set to one of several turns",
        )
    if c.rollout.name != "hf" or c.trainer.backend != "local":
        yield (("actor_rollout_ref.rollout.multi_turn.repeatable",), "only an engine in this process waits for tools")
