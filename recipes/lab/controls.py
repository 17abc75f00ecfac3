"""A control of papers' tables: a trainer that learns from rewards which belong to other answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any


def with_rewards_of_others(trainer: type) -> type:
    """Return the trainer with a planted bug: each answer trains on the score of the next one.

    The last answer has the first one's score. Answers of a group are drawn independently,
    so that no reward depends on its answer, while the rewards of a batch stay what they were.
    """

    class RewardsOfOthers(trainer):
        def make_batch(self, groups_P: Sequence[Any], *more: Any) -> Any:
            scores = [score for group in groups_P for score in group.scores]
            shifted = iter([*scores[1:], *scores[:1]])
            groups = [replace(g, scores=tuple(next(shifted) for _ in g.scores)) for g in groups_P]
            return super().make_batch(tuple(groups), *more)

    return RewardsOfOthers
