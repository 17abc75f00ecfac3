"""The reward of an environment that played the episode: ``agent_loop=verifiers`` leaves it with the answer.

Nothing is graded here. An answer whose environment failed has no reward, which is a crash and no zero. An answer that
no environment played (the examples that are graded at start) is compared with the ground truth as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_scores.score import Score, ScoreStatus, graded, no_answer

REWARD = "environment"  # in extra_info["rollout_reward_scores"]; "environment/<name>" are the rubric's metrics
EXAMPLES = (("4", "4", 1.0), ("5", "4", 0.0), ("", "4", 0.0))


def score(response: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> Score:
    """Return the environment's reward with its metrics as parts; ``acc`` is the reward.

    Raises ValueError for an episode without one.
    """
    facts = extra_info or {}
    if "rollout" not in facts:
        return graded(response == ground_truth, response) if response else no_answer()
    found = facts.get("rollout_reward_scores") or {}
    if REWARD not in found:
        raise ValueError(
            "no environment rewarded the episode: it failed, or actor_rollout_ref.rollout.agent_loop is not verifiers"
        )
    parts = {name.removeprefix(f"{REWARD}/"): value for name, value in found.items() if name.startswith(f"{REWARD}/")}
    value = found[REWARD]
    return Score(value, {**parts, "acc": value}, ScoreStatus.OK if value > 0 else ScoreStatus.WRONG)
