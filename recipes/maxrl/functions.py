"""The advantage of MaxRL (arXiv:2602.02710)."""

import torch
from torch import Tensor

from core.algorithm.advantages import AdvantageInputs


def maxrl(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Divide deviations from the group's mean by the mean: ``A_i = (R_i - mean) / mean``.

    A group whose mean is 0 gets 0. Raises ValueError: a negative reward, of which the mean is no
    rate of success.
    """
    if (x.rewards_B < 0).any():
        raise ValueError("maxrl divides by a group's mean score: every score must be at least 0")
    deviation_B = x.relative_rewards_B - x.group_mean()
    mean_B = x.rewards_B - deviation_B
    advantages = x.spread(torch.where(mean_B > 0, deviation_B / mean_B, 0.0))
    return advantages, advantages
