"""DAPO (arXiv:2503.14476): overlong answers and dynamic sampling, as two hooks of the core trainer.

Clip-higher and the token-level loss are keys of core (``actor_rollout_ref.actor``). Departures from
the published code stand in README.md.
"""

from __future__ import annotations

import dataclasses

from core.errors import InputError
from core.ray_trainer import RayPPOTrainer
from core.rollout.collect import CollectLimits
from core.types import ScoredGroup, Trajectory
from recipes.dapo.functions import overlong_punishment
from reward_scores.score import Score

# verl's names of the shaped score; the second is refused with KL in reward
SHAPED = ("seq_reward", "seq_final_reward")
SAME = 1e-6  # rewards this close are equal: what is left is rounding


class RayDAPOTrainer(RayPPOTrainer):
    """The core trainer with overlong punishment, overlong filtering and group filtering.

    Each has a key that switches it on.
    """

    def shape_reward(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score with the length penalty, masked if overlong filtering leaves it out.

        The penalty is part ``overlong``. A masked answer carries no loss and enters no denominator;
        its reward still counts in its group's mean and standard deviation. With
        ``overlong_buffer.log``, ``reward/is_overlong/mean`` is the share that was punished.
        """
        buffer = self.config.reward_model.overlong_buffer
        if buffer.enable:
            length = len(trajectory.response_ids)
            limit = self.config.data.max_response_length
            penalty = buffer.penalty_factor * overlong_punishment(length, limit, buffer.len)
            score = score.plus("overlong", penalty)
            if buffer.log:
                parts = {**score.parts, "is_overlong": float(penalty < 0)}
                score = dataclasses.replace(score, parts=parts)
        if self.config.actor_rollout_ref.actor.overlong_filtering and trajectory.truncated:
            score = dataclasses.replace(score, masked=True)
        return score

    def keep_group(self, group: ScoredGroup) -> bool:
        """Return whether the answers differ in the metric (eq. 8).

        Groups of equal answers have no advantage. A masked answer that could not be graded is
        ignored: it is no evidence about the group.
        """
        filters = self.config.algorithm.filter_groups
        if not filters.enable:
            return True
        metric = filters.metric or "acc"
        graded = [score for score in group.scores if not score.left_out]
        values = [compared_value(score, group, metric) for score in graded]
        return len(values) > 1 and max(values) - min(values) > SAME

    def collect_limits(self) -> CollectLimits:
        """Return the limits of ``algorithm.filter_groups`` on the prompts that a step draws."""
        limits = super().collect_limits()
        filters = self.config.algorithm.filter_groups
        if not filters.enable:
            return limits
        return dataclasses.replace(
            limits,
            max_drawn=filters.max_num_gen_batches * limits.max_in_flight or limits.max_drawn,
            raise_on_exhausted=filters.on_exhausted == "raise",
            key_to_increase="algorithm.filter_groups.max_num_gen_batches or data.gen_batch_size",
        )


def compared_value(score: Score, group: ScoredGroup, metric: str) -> float:
    """Return the value that the filter compares. Raises InputError if the scorer has none."""
    if metric in SHAPED or (score.ungraded and metric not in score.parts):
        return score.value
    if metric not in score.parts:
        raise InputError(
            f"algorithm.filter_groups.metric={metric}: the scorer of "
            f"data_source={group.prompt.data_source} gives no such part; use one of "
            f"{', '.join(sorted(score.parts))}, or seq_reward (the shaped score)"
        )
    return score.parts[metric]
