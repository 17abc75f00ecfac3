"""Search-R1 (arXiv:2503.09516): a trajectory is an episode in which the policy searches.

Everything else is the core trainer's: what a search returned lies outside ``response_mask``, so it
carries no loss, no entropy, no KL and no value target (the paper's retrieved-token masking, section
3.1), whatever the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.algorithm.sequences import count_by_sequence
from core.ray_trainer import RayPPOTrainer
from core.types import ScoredGroup, TrainBatch


class SearchR1Trainer(RayPPOTrainer):
    """The core trainer with search episodes (``recipes.search_r1.search_loop``)."""

    def response_limit(self, prompt_length: int) -> int:
        """Return the most tokens of an episode behind a prompt, as published.

        ``data.max_response_length`` is a turn's. Prompt and episode together have
        ``data.max_prompt_length`` tokens and one turn more.
        """
        data = self.config.data
        return data.max_prompt_length + data.max_response_length - prompt_length

    def make_batch(self, groups_P: Sequence[ScoredGroup]) -> TrainBatch:
        """Return the groups as one batch, in the ablation with a loss on retrieved tokens."""
        batch = super().make_batch(groups_P)
        if self.config.actor_rollout_ref.actor.state_masking:
            return batch
        return training_on_retrieved(batch, groups_P)


def training_on_retrieved(batch: TrainBatch, groups_P: Sequence[ScoredGroup]) -> TrainBatch:
    """Return the batch as if the policy had written the whole responses: the paper's ablation."""
    trajectories = [trajectory for group in groups_P for trajectory, _, _ in group.sequences]
    masks = []
    for trajectory in trajectories:
        masks.append(np.zeros(len(trajectory.prompt_ids), np.bool_))
        masks.append(np.ones(len(trajectory.response_ids), np.bool_))
    response_mask = torch.from_numpy(np.concatenate(masks))
    carries_loss_B = count_by_sequence(batch.loss_mask, batch.lengths) > 0
    return batch.adding(
        response_mask=response_mask,
        loss_mask=response_mask & carries_loss_B.repeat_interleave(batch.lengths),
        sampled_mask=batch.response_mask,
    )
