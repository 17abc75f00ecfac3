"""Dynamic sampling (arXiv:2503.14476, the constraint of eq. 8): which groups a step trains on."""

from __future__ import annotations

from core.errors import InputError
from core.types import ScoredGroup
from reward_scores.score import Score, ScoreStatus

SHAPED = ("seq_reward", "seq_final_reward")  # verl's names of the shaped score; the second is refused with KL in reward
SAME = 1e-6  # rewards this close are equal: what is left is rounding
FAILED = (ScoreStatus.TIMEOUT, ScoreStatus.CRASH)


def answers_differ(group: ScoredGroup, metric: str) -> bool:
    """Return whether the answers differ in the metric: groups of equal answers have no advantage.

    A masked answer that could not be graded is ignored: it is no evidence about the group.
    """
    counted = (score for score in group.scores if not (score.masked and score.status in FAILED))
    values = [compared_value(score, group, metric) for score in counted]
    return len(values) > 1 and max(values) - min(values) > SAME


def compared_value(score: Score, group: ScoredGroup, metric: str) -> float:
    """Return the value that the filter compares. Raises InputError where the scorer gives no such part."""
    if metric in SHAPED or (score.status in FAILED and metric not in score.parts):
        return score.value
    if metric not in score.parts:
        raise InputError(
            f"algorithm.filter_groups.metric={metric}: the scorer of data_source={group.prompt.data_source} gives no "
            f"such part; use one of {', '.join(sorted(score.parts))}, or seq_reward (the shaped score)"
        )
    return score.parts[metric]
