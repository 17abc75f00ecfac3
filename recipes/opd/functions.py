"""The rewards of the tokens that the student wrote, by name: ``distillation.token_reward``.

Each function takes the student's and the teacher's log-probs, [N], and the mask of the tokens that
the student wrote, [N] bool. It returns the rewards, [N], which are 0 elsewhere. ``log_ratio``
distils. The others ask how much of the teacher that needs (``tables/no_teacher.yaml``).
"""

from __future__ import annotations

import torch
from torch import Tensor

UNLIKELY = 0.2  # the share of the tokens that `unlikely` lowers


def log_ratio(student_N: Tensor, teacher_N: Tensor, response_mask: Tensor) -> Tensor:
    """Return log p(teacher) - log p(student), the reverse KL's reward (arXiv:2306.08543)."""
    return torch.where(response_mask, teacher_N - student_N, 0)


def sign(student_N: Tensor, teacher_N: Tensor, response_mask: Tensor) -> Tensor:
    """Return 1 where the teacher finds the token likelier, -1 where the student does, else 0."""
    return log_ratio(student_N, teacher_N, response_mask).sign()


def shuffled(student_N: Tensor, teacher_N: Tensor, response_mask: Tensor) -> Tensor:
    """Return the rewards of :func:`log_ratio`, each at another token of the batch.

    The number of tokens decides the order, so that a resumed run repeats it.
    """
    reward_N = log_ratio(student_N, teacher_N, response_mask)
    rewards = reward_N[response_mask]
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(len(rewards)))
    return reward_N.masked_scatter(response_mask, rewards[order])


def unlikely(student_N: Tensor, teacher_N: Tensor, response_mask: Tensor) -> Tensor:
    """Return -1 at the tokens that the student found least likely; the teacher has no say."""
    count = round(UNLIKELY * int(response_mask.sum()))
    lowest = student_N.masked_fill(~response_mask, torch.inf).argsort(stable=True)[:count]
    return torch.zeros_like(student_N).index_fill(0, lowest, -1.0)


TOKEN_REWARDS = {
    "log_ratio": log_ratio,
    "sign": sign,
    "shuffled": shuffled,
    "unlikely": unlikely,
}
