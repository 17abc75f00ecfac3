"""Asymmetric REINFORCE (arXiv:2506.20520): the advantage is the score less a shifted baseline."""

import torch

from core.algorithm.sequences import spread_over_tokens
from core.ray_trainer import RayPPOTrainer
from core.types import StepMetrics, TrainBatch


class RayAsymRETrainer(RayPPOTrainer):
    """The core trainer with ``V = mean of the group + baseline_shift``."""

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Subtract the shift from the advantages ``R - mean`` of every answer that was graded."""
        batch = super().compute_advantages(batch, metrics)
        graded_N = batch.response_mask & spread_over_tokens(batch.in_group_stats, batch.lengths)
        shift_N = torch.where(graded_N, self.config.baseline_shift, 0.0)
        return batch.adding(advantages=batch.advantages - shift_N)
