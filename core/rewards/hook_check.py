"""The training hooks, tried on an example answer of every data source before a model is loaded.

A hook that cannot work with what a scorer gives (a filter on a part that is not there, say) then ends the run at its
start, not after the first answers of a cluster.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from core.data.parquet import Row
from core.rewards import RewardLayer
from core.rewards.grading import Failure, Job
from core.tracking.metrics import RAW_SCORE
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score


def rehearse(
    rows: Iterable[Row],
    reward: RewardLayer,
    tokenizer: Any,
    shape_reward: Callable[[Score, Trajectory], Score],
    keep_group: Callable[[ScoredGroup], bool],
) -> None:
    """Shapes and judges a group of one example answer for each data source of ``rows``.

    The answers are the scorer's own examples; for a function without any, nothing at all, the empty answer, on the
    source's first row: a function must give the same parts for every answer. What cannot be graded is passed over.
    Raises what the hooks raise.
    """
    seen: set[str] = set()
    for row in rows:
        if row.data_source in seen:
            continue
        seen.add(row.data_source)
        examples = reward.grader.scorer(row.data_source).examples
        answer, ground_truth = examples[0][:2] if examples else ("", row.ground_truth)
        score = asyncio.run(reward.executor.run(Job(row.data_source, answer, ground_truth, row.extra_info or {})))
        if isinstance(score, Failure):
            continue
        ids = tokenizer.encode(answer, add_special_tokens=False) or [tokenizer.pad_token_id]
        length = len(ids)
        trajectory = Trajectory([0], ids, [True] * length, [0.0] * length, (), Stop.EOS, 0, 0)
        score = dataclasses.replace(score, parts={**score.parts, RAW_SCORE: score.value})
        shaped = shape_reward(score, trajectory)
        prompt = Prompt(0, row.where, (0,), (), ground_truth, row.data_source)
        keep_group(ScoredGroup(prompt, (trajectory,) * 2, (shaped,) * 2))
