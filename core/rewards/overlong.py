"""The length of an answer in its score: soft overlong punishment and overlong filtering (arXiv:2503.14476).

Each is off unless its key is set: ``reward_model.overlong_buffer.enable``,
``actor_rollout_ref.actor.overlong_filtering``.
"""

from __future__ import annotations

import dataclasses

from core.config import Config
from core.types import Trajectory
from reward_scores.score import Score


def overlong_punishment(length: int, limit: int, buffer: int) -> float:
    """Return ``R_length`` of eq. 13: 0 up to ``limit - buffer`` tokens, then linear, -1 from ``limit`` on.

    Args:
        length: tokens of the response, the end-of-sequence token included.
        limit: ``L_max``. ``buffer``: ``L_cache``, between 1 and ``limit``.
    """
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def with_length(score: Score, trajectory: Trajectory, config: Config) -> Score:
    """Return the score with the length penalty in part ``overlong``, masked where filtering leaves the answer out.

    A masked answer carries no loss and enters no denominator; its reward still counts in its group's mean and standard
    deviation (``core.learner.batching.make_batch``). With ``overlong_buffer.log``, part ``is_overlong`` is 1 where the
    answer reached into the buffer: ``reward/is_overlong/mean`` is the share that did.
    """
    buffer, limit = config.reward_model.overlong_buffer, config.data.max_response_length
    if buffer.enable:
        penalty = buffer.penalty_factor * overlong_punishment(len(trajectory.response_ids), limit, buffer.len)
        score = score.plus("overlong", penalty)
        if buffer.log:
            score = dataclasses.replace(score, parts={**score.parts, "is_overlong": float(penalty < 0)})
    if config.actor_rollout_ref.actor.overlong_filtering and trajectory.truncated:
        score = dataclasses.replace(score, masked=True)
    return score
