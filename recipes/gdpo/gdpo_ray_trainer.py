"""GDPO (arXiv:2601.05242): the core trainer with advantages of each part of a score."""

import dataclasses
from collections.abc import Sequence

import torch

from core.algorithm.advantages import inputs_of
from core.errors import InputError
from core.ray_trainer import RayPPOTrainer
from core.types import ScoredGroup, StepMetrics, TrainBatch, Trajectory
from recipes.gdpo.functions import gdpo
from reward_scores.score import Score


class RayGDPOTrainer(RayPPOTrainer):
    """The core trainer; ``reward_weights`` names the parts that train."""

    def shape_reward(self, score: Score, trajectory: Trajectory) -> Score:
        """Make the weighted sum of the parts the score. Raises InputError: a part is missing."""
        if score.ungraded:
            return score
        weights = self.config.reward_weights
        if missing := [name for name in weights if name not in score.parts]:
            raise InputError(
                f"reward_weights.{missing[0]}={weights[missing[0]]}: the scorer returns no such "
                f"part; choose of {', '.join(score.parts)}"
            )
        value = sum(weight * score.parts[name] for name, weight in weights.items())
        return dataclasses.replace(score, value=value)

    def make_batch(self, groups_P: Sequence[ScoredGroup]) -> TrainBatch:
        """Return the groups as a batch, and keep the parts of their scores for the advantages."""
        scores = [score for group in groups_P for _, score, _ in group.sequences]
        self.parts = {
            name: torch.tensor([score.parts.get(name, 0.0) for score in scores])
            for name in self.config.reward_weights
        }
        return super().make_batch(groups_P)

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set the advantages that :func:`recipes.gdpo.functions.gdpo` makes of the parts."""
        inputs = inputs_of(batch, self.config.algorithm)
        advantages = gdpo(inputs, self.parts, self.config.reward_weights)
        return batch.adding(advantages=advantages, returns=advantages)
