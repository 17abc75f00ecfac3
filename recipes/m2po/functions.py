"""The loss of M2PO (arXiv:2510.01161), and the tokens that it masks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.algorithm.losses import LossInputs, Stats

BOUND = 0.04  # on the mean of (log r)^2, as published


def m2po(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return ``-A r``, and 0 for the tokens that :func:`outliers` chose."""
    loss = -x.advantages * x.log_ratio.exp()
    stats = x.stats(pg_clipfrac=x.selected, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio)
    return loss.masked_fill(x.selected, 0), stats


def outliers(x: LossInputs, gather: Callable[[Any], list[Any]]) -> Tensor:
    """Return the tokens with the largest ``(log r)^2``, [N] bool: as few as the bound allows.

    Only tokens count whose update leads away from the old policy: ``A > 0`` and ``r > 1``, or
    ``A < 0`` and ``r < 1``. The mean of ``(log r)^2`` over those that stay, on all ranks, is at
    most ``BOUND``.
    """
    leads_away = x.mask & (x.advantages * x.log_ratio > 0)
    squares = x.log_ratio.detach().double().square()
    sorted_squares = torch.cat(gather(squares[leads_away])).sort().values
    count = torch.arange(1, len(sorted_squares) + 1, device=sorted_squares.device)
    kept = int((sorted_squares.cumsum(0) / count <= BOUND).sum())
    if kept == len(sorted_squares):
        return torch.zeros_like(leads_away)
    return leads_away & (squares >= sorted_squares[kept])


m2po.select = outliers  # called once for each optimizer step
m2po.moves_without_advantage = False  # with A = 0 it is 0: such sequences are left out
