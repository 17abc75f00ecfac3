"""Sums, means and recursions: over the sequences of a flat batch, and over the entries that a mask
keeps.

``lengths_B`` counts the tokens of each sequence of [N] tokens, one sequence after another; a
sequence may have none. What lies outside a mask may be anything, NaN included: it is selected away,
never multiplied by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_sequence(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [B]: the sum over each sequence's tokens, 0 of none. ``values_N`` are floats."""
    if not len(lengths_B):  # a rank may have no sequence, which segment_reduce refuses
        return values_N.new_zeros(0)
    return torch.segment_reduce(values_N, "sum", lengths=lengths_B)


def max_by_sequence(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [B]: the largest of each sequence's tokens, minus infinity of none. ``values_N`` are
    floats."""
    return torch.segment_reduce(values_N, "max", lengths=lengths_B)


def count_by_sequence(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [B] int64: of how many tokens of each sequence a mask is True."""
    return sum_by_sequence(mask_N.double(), lengths_B).long()


def mean_by_sequence(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [B]: the mean over the tokens of each sequence that the mask keeps, 0 of none."""
    kept_N = values_N.masked_fill(~mask_N, 0)
    return sum_by_sequence(kept_N, lengths_B) / count_by_sequence(mask_N, lengths_B).clamp(min=1)


def spread_over_tokens(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [N]: a sequence's number at each of its tokens."""
    return values_B.repeat_interleave(lengths_B)


def discounted_sums(values_N: Tensor, lengths_B: Tensor, decay: float) -> Tensor:
    """Return [N]: ``s_t = x_t + decay * s_{t+1}`` from the last token of each sequence to its
    first.

    A loop over positions: in its k-th pass are the tokens that k others of their sequence follow.
    """
    # So those that have a k-th last token come first
    order_B = lengths_B.argsort(descending=True, stable=True)
    last_B = (lengths_B.cumsum(0) - 1)[order_B]
    longer_K = (
        (len(lengths_B) - torch.bincount(lengths_B).cumsum(0)).tolist() if len(lengths_B) else []
    )
    sums_N, running_B = torch.empty_like(values_N), values_N.new_zeros(len(lengths_B))
    for k, count in enumerate(longer_K):
        if not count:
            break
        place = last_B[:count] - k
        running_B = values_N[place] + decay * running_B[:count]
        sums_N[place] = running_B
    return sums_N


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the kept entries, [] of [...]; 0 where there are none. The mask is bool or 0/1."""
    return values.masked_fill(~mask.bool(), 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average the kept entries, [] of [...]; 0 where there are none."""
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the kept entries, [] of [...], with Bessel's correction if
    ``unbiased``.

    Raises ValueError: no entry is kept, or one entry and ``unbiased``.
    """
    count = int(mask.sum())
    if count < 1 + unbiased:
        raise ValueError(
            f"a variance over {count} tokens does not exist: whitening needs at least two "
            f"response tokens in the batch"
        )
    return masked_sum((values - masked_mean(values, mask)).square(), mask) / (count - unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return ``(values - mean) / sqrt(var + 1e-8)`` of every entry, [...], with the statistics of
    the kept ones.

    ``shift_mean=False`` keeps the mean and scales the spread alone.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean
