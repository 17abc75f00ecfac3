"""Sums, means and variances over the entries that a mask keeps.

What lies outside a mask may be anything, NaN included: it is selected away, never multiplied by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the kept entries, 0 where there are none.

    Shapes:
        values, mask  [...]  of one shape; ``mask`` is bool or 0/1
        result        []
    """
    return values.masked_fill(~mask.bool(), 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average the kept entries, 0 where there are none. Shapes as :func:`masked_sum`."""
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the kept entries, with Bessel's correction if ``unbiased``.

    Shapes:
        values, mask  [...]
        result        []

    Raises:
        ValueError: no entry is kept, or one entry and ``unbiased``.
    """
    count = int(mask.sum())
    if count < 1 + unbiased:
        raise ValueError(
            f"a variance over {count} tokens does not exist: whitening needs at least two response tokens in the batch"
        )
    squares = masked_sum((values - masked_mean(values, mask)).square(), mask)
    return squares / (count - unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return ``(values - mean) / sqrt(var + 1e-8)`` of every entry, with the statistics of the kept ones.

    Shapes:
        values, mask, result  [...]

    ``shift_mean=False`` keeps the mean and scales the spread alone.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean
