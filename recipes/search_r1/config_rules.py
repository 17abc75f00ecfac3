"""Rules on Search-R1's keys (see core/config/rules.py)."""

from __future__ import annotations

from core.config.rules import Broken
from core.config.schema import Config


def the_prompt_fits(config: Config) -> Broken:
    start = config.data.max_start_length
    limit = config.data.max_prompt_length
    if start is not None and start > limit:
        rule = f"must be at most data.max_prompt_length={limit}, which holds prompt and episode"
        yield "data.max_start_length", rule, "lower it, or leave it out"


def a_loop_plays_the_episodes(config: Config) -> Broken:
    if config.actor_rollout_ref.rollout.agent_loop is None:
        key = "actor_rollout_ref.rollout.agent_loop"
        rule = "the trainer of this recipe plays episodes"
        yield key, rule, "leave it out, or name a loop: tool_agent, path/file.py:Class"


PROBLEMS = (the_prompt_fits, a_loop_plays_the_episodes)
