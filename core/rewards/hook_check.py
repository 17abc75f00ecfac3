"""Tries the training hooks on an example answer of every data source before a model is loaded.

A hook that cannot work with what a scorer returns (a filter on a part that is not there, for example) then ends the
run at its start, not after the first answers of a cluster. What the scorers return is checked before, by
:mod:`core.rewards.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from core.data.parquet import Example
from core.rewards.check import MODEL_STYLE
from core.rewards.grading import ModelScore
from core.rewards.layer import RewardLayer
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score


def check_hooks(
    rows: Sequence[Example],
    reward: RewardLayer,
    tokenizer: Any,
    shape_reward: Callable[[Score, Trajectory], Score],
    keep_group: Callable[[ScoredGroup], bool],
) -> None:
    """Call both hooks with a group of one example answer for each data source of ``rows``.

    The answer is the scorer's first example; for a user's function one that it graded at start: a function must return
    the same parts for every answer. A row for a reward model has that model's parts. Raises what the hooks raise.
    """
    for row in {row.data_source: row for row in reversed(rows)}.values():  # the first row of each source
        if row.style == MODEL_STYLE:  # which need not have a scorer
            answer, score = "", Score(0.0, ModelScore(0.0).parts)
        else:
            answer, score = reward.known_answer(row)
        ids = tokenizer.encode(answer, add_special_tokens=False) or [tokenizer.pad_token_id]
        length = len(ids)
        trajectory = Trajectory([0], ids, [True] * length, [0.0] * length, (), Stop.EOS, 0, 0)
        shaped = shape_reward(score.keeping_raw(), trajectory)
        prompt = Prompt(0, row.where, (0,), (), row.ground_truth, row.data_source)
        keep_group(ScoredGroup(prompt, (trajectory,) * 2, (shaped,) * 2))
