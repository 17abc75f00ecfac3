"""Controls of papers' tables: rewards that belong to other questions, and a coin in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from reward_scores import hops, random_reward


def with_rewards_of_others(trainer: type) -> type:
    """Return the trainer with a planted bug: each answer trains on a score of the next question.

    The last question's answers have the first one's scores. No answer's own score is in its group,
    so that a group's mean and deviation do not hold it either.
    """

    class RewardsOfOthers(trainer):
        def make_batch(self, groups_P: Sequence[Any], *more: Any) -> Any:
            if len(groups_P) < 2:
                raise ValueError("a batch of one question holds no rewards of others")
            others_P = [*groups_P[1:], groups_P[0]]
            groups = [
                replace(group, scores=tuple(islice(cycle(other.scores), len(group.scores))))
                for group, other in zip(groups_P, others_P, strict=True)
            ]
            return super().make_batch(tuple(groups), *more)

    return RewardsOfOthers


def coin(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Score an answer to hops by a fair coin; ``acc``, which a validation reports, is the truth.

    Equal answers to a question share their coin, so that a run repeats.
    """
    seed = {"seed": f"coin {extra_info['index']}"}
    score = random_reward.score(solution_str, None, seed).value
    return {"score": score, **hops.score(solution_str, ground_truth).parts}
