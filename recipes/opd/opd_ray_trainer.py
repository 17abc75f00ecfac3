"""On-policy distillation: a teacher scores each token that the student wrote (arXiv:2306.13649,
arXiv:2306.08543).

The reverse KL of student and teacher, sampled on the student's answers, is the reward of each
token.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from core.algorithm.sequences import masked_mean
from core.errors import InputError
from core.learner.models import load_tokenizer
from core.ray_trainer import RayPPOTrainer
from core.types import StepMetrics, TrainBatch


class RayOPDTrainer(RayPPOTrainer):
    """The core trainer with a teacher whose log-probs are advantages."""

    def needs_old_log_probs(self, batch: TrainBatch) -> bool:
        """Return True, unless the engine's log-probs serve as the student's."""
        return not self.config.algorithm.rollout_correction.bypass_mode

    def load_data(self) -> None:
        """Load the data, and refuse a teacher whose token ids mean other tokens. Raises
        InputError."""
        super().load_data()
        frozen = self.config.frozen_models["teacher"]
        teacher, student = vocabulary(load_tokenizer(frozen.model)), vocabulary(self.tokenizer)
        if teacher != student:
            rule = f"its tokenizer has {teacher}, the policy's {student}"
            raise InputError(
                f"{frozen.key}={frozen.model.path}: {rule}; take a teacher with the "
                f"policy's tokenizer"
            )

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``advantages`` to the estimator's times ``reward_weight`` plus each token's reward
        times ``coef``."""
        keys, batch = self.config.distillation, super().compute_advantages(batch, metrics)
        with metrics.time("teacher"):
            teacher_N = self.workers.compute_ref_log_prob(batch, "teacher")
        student_N = batch.old_log_probs if batch.has("old_log_probs") else batch.rollout_log_probs
        reward_N = token_reward(student_N, teacher_N, batch.response_mask)
        metrics.add({"distillation/reverse_kl": -float(masked_mean(reward_N, batch.response_mask))})
        return batch.adding(advantages=keys.reward_weight * batch.advantages + keys.coef * reward_N)


def token_reward(student_N: Tensor, teacher_N: Tensor, response_mask: Tensor) -> Tensor:
    """Return [N]: log p(teacher) - log p(student) of each token that the student wrote, 0
    elsewhere."""
    return torch.where(response_mask, teacher_N - student_N, 0)


def vocabulary(tokenizer) -> str:
    """Return how many tokens there are, and a hash of token -> id."""
    pairs = sorted(tokenizer.get_vocab().items())
    return f"{len(pairs)} tokens (SHA-256 {hashlib.sha256(repr(pairs).encode()).hexdigest()[:12]})"
