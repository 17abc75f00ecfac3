"""Rules on who plays an episode: Search-R1's keys, an agent loop, or tools."""

from __future__ import annotations

from core.config.rules.rule import ROLLOUT, Rule
from core.config.view import View

SEARCHING = "python -m recipes.search_r1.main_search_r1"

SEARCH_KEYS = (
    *("max_turns", "do_search", "data.max_start_length", "data.max_obs_length"),
    *(f"retriever.{name}" for name in ("url", "topk", "prefetch", "client", "local")),
)


def _given(v: View, key: str) -> bool:
    return any(given == key or given.startswith(f"{key}.") for given in v.given)


EPISODES = (
    *(
        Rule(
            key,
            lambda v, key=key: "generate" not in v.hooks and _given(v, key),
            "belongs to Search-R1, and the trainer of recipe {recipe} does not search",
            f"use the recipe whose trainer does: {SEARCHING}",
        )
        for key in SEARCH_KEYS
    ),
    Rule(
        f"{ROLLOUT}.agent_loop",
        lambda v: v.rollout.agent_loop and v.rollout.multi_turn.enable,
        "and multi_turn.enable=True, which is the tool agent, both say how an episode goes",
        "leave one out",
    ),
    Rule(
        f"{ROLLOUT}.agent_loop",
        lambda v: "generate" in v.hooks and v.rollout.agent_loop is None,
        "the trainer of recipe {recipe} plays episodes",
        "leave it out, or name a class: path/file.py:Class",
    ),
    Rule(
        f"{ROLLOUT}.multi_turn.tool_config_path",
        lambda v: v.rollout.multi_turn.enable and not v.rollout.multi_turn.tool_config_path,
        "is needed with multi_turn.enable=True",
        "name a YAML file with tools (core/rollout/tools.py says what it holds)",
    ),
    Rule(
        "data.max_start_length",
        lambda v: v.data.max_start_length is not None and v.data.max_start_length > v.data.max_prompt_length,
        "must be at most data.max_prompt_length={data.max_prompt_length}, which holds prompt and episode",
        "lower it, or leave it out",
    ),
)
