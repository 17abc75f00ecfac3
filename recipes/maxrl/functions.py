"""The advantage of MaxRL (arXiv:2602.02710)."""

import torch
from torch import Tensor

from core.algorithm.advantages import AdvantageInputs, group_stats


def maxrl(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Divide deviations from the group's mean by the mean: ``A_i = (R_i - mean) / mean``.

    A group whose mean is 0 gets 0. Raises ValueError: a negative reward, of which the mean is no
    rate of success.
    """
    if (x.rewards_B < 0).any():
        raise ValueError("maxrl divides by a group's mean score: every score must be at least 0")
    deviation = group_stats(x).centred_B
    mean = x.rewards_B - deviation
    advantages = x.spread(torch.where(mean > 0, deviation / mean, 0.0))
    return advantages, advantages
