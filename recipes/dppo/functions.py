"""The loss of DPPO, the variant Binary-TV (arXiv:2602.04879)."""

import torch
from torch import Tensor

from core.algorithm.losses import LossInputs, Stats


def dppo(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return ``-A r``, and 0 where the token's probability has moved too far in A's direction.

    Too far is more than ``clip_ratio_high`` up where A > 0, more than ``clip_ratio_low`` down where
    A < 0. The total variation between the two Bernoulli distributions "this token or another one"
    is ``|p - p_old|``.
    """
    moved = x.log_prob.detach().exp() - x.old_log_prob.exp()
    up = (x.advantages > 0) & (moved > x.config.clip_ratio_high)
    down = (x.advantages < 0) & (moved < -x.config.clip_ratio_low)
    loss = -x.advantages * x.log_ratio.exp()
    stats = x.stats(
        pg_clipfrac=up | down, pg_clipfrac_high=up, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio
    )
    return torch.where(up | down, 0, loss), stats


dppo.moves_without_advantage = False  # with A = 0 it is 0: such sequences are left out
