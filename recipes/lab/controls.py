"""Controls of papers' tables: rewards that belong to other answers, and a coin in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reward_scores import hops, random_reward


def with_rewards_of_others(trainer: type) -> type:
    """Return the trainer with a planted bug: each answer trains on the score of the next one.

    The last answer has the first one's score. The next one mostly answers the same question. So a
    group's mean still holds an answer's own score, and advantages that subtract it turn against the
    true ones, at a weight of 1 / (n - 1): the control asks whether the rewards matter, and not what
    noise does, which :func:`coin` shows.
    """

    class RewardsOfOthers(trainer):
        def make_batch(self, groups_P: Sequence[Any], *more: Any) -> Any:
            scores = [score for group in groups_P for score in group.scores]
            shifted = iter([*scores[1:], *scores[:1]])
            groups = [replace(g, scores=tuple(next(shifted) for _ in g.scores)) for g in groups_P]
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
