"""Search-R1 (arXiv:2503.09516): a trajectory is an episode in which the policy searches.

Everything else is the core trainer's: what a search returned lies outside ``response_mask``, so it
carries no loss, no entropy, no KL and no value target (the paper's retrieved-token masking, section
3.1), whatever the algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from core.algorithm.sequences import count_by_sequence
from core.ray_trainer import RayPPOTrainer
from core.types import ScoredGroup, TrainBatch
from recipes.search_r1.search_loop import ANSWER, SEARCH

log = logging.getLogger(__name__)
READ_PROMPTS = 100  # in which the instruction is looked for


class SearchR1Trainer(RayPPOTrainer):
    """The core trainer with search episodes (``recipes.search_r1.search_loop``)."""

    def load_data(self) -> None:
        """Load the data, and warn if the questions do not tell the policy how it can search."""
        super().load_data()
        first = [self.stream.prompt(i) for i in range(min(READ_PROMPTS, len(self.stream)))]
        if all(prompt.data_source.startswith("lab/") for prompt in first):
            return  # the lab's base model knows the protocol
        tag = f"<{SEARCH if self.config.do_search else ANSWER}>"
        if not any(tag in str(message["content"]) for p in first for message in p.messages):
            log.warning(
                "data.train_files=%s: no prompt of the first %d mentions %s, so that only a model "
                "that knows the protocol uses it; data_preprocess/search_r1_prompts.py has the "
                "published instruction",
                ", ".join(self.config.data.train_files),
                len(first),
                tag,
            )

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
