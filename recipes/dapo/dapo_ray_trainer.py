"""DAPO (arXiv:2503.14476): the two places where it is more than a configuration of the core trainer.

``shape_reward`` is soft overlong punishment (eq. 13) and overlong filtering, ``keep_group`` dynamic sampling (the
constraint of eq. 8). Clip-higher and the token-level loss are keys. README.md says where this departs from the paper.
"""

from __future__ import annotations

import dataclasses

from core.errors import InputError
from core.ray_trainer import RayPPOTrainer
from core.types import ScoredGroup, Trajectory
from recipes.dapo.overlong_punishment import overlong_punishment
from reward_scores.score import Score, ScoreStatus

SHAPED = ("seq_reward", "seq_final_reward")  # verl's names of the shaped score; the second is refused with KL in reward
SAME = 1e-6  # rewards this close are equal: what is left is rounding
FAILED = (ScoreStatus.TIMEOUT, ScoreStatus.CRASH)


class RayDAPOTrainer(RayPPOTrainer):
    """The core trainer with DAPO's two hooks. Each technique is off where its key is."""

    def shape_reward(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score with the length penalty in part ``overlong``, masked where filtering leaves the answer out.

        A masked answer carries no loss and enters no denominator; its reward still counts in its group's mean and
        standard deviation (``core.learner.batching.make_batch``). With ``overlong_buffer.log``, part ``is_overlong``
        is 1 where the answer reached into the buffer: ``reward/is_overlong/mean`` is the share that did.
        """
        buffer, limit = self.config.reward_model.overlong_buffer, self.config.data.max_response_length
        if buffer.enable:
            penalty = buffer.penalty_factor * overlong_punishment(len(trajectory.response_ids), limit, buffer.len)
            score = score.plus("overlong", penalty)
            if buffer.log:
                score = dataclasses.replace(score, parts={**score.parts, "is_overlong": float(penalty < 0)})
        if self.config.actor_rollout_ref.actor.overlong_filtering and trajectory.truncated:
            score = dataclasses.replace(score, masked=True)
        return score

    def keep_group(self, group: ScoredGroup) -> bool:
        """Return whether the answers differ in ``algorithm.filter_groups.metric``: equal ones have no advantage.

        A masked answer that could not be graded is ignored: it is no evidence about the group.
        """
        if not self.config.algorithm.filter_groups.enable:
            return True
        counted = (score for score in group.scores if not (score.masked and score.status in FAILED))
        values = [self.metric(score, group) for score in counted]
        return len(values) > 1 and max(values) - min(values) > SAME

    def metric(self, score: Score, group: ScoredGroup) -> float:
        """Return the value that dynamic sampling compares. Raises InputError where the scorer gives no such part."""
        name = self.config.algorithm.filter_groups.metric
        if name in SHAPED or (score.status in FAILED and name not in score.parts):
            return score.value
        if name not in score.parts:
            raise InputError(
                f"algorithm.filter_groups.metric={name}: the scorer of data_source={group.prompt.data_source} gives no "
                f"such part; use one of {', '.join(sorted(score.parts))}, or seq_reward (the shaped score)"
            )
        return score.parts[name]
