"""Sums, means and recursions over the sequences of a flat batch, and over the entries of a mask.

``lengths_B`` counts the tokens of each sequence in [N] tokens, one sequence after another; a
sequence may have none. What lies outside a mask may be anything, NaN included: it is selected away,
never multiplied by zero.
"""

import torch
from torch import Tensor


def sum_by_sequence(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the sum over each sequence's tokens, [B] float; 0 for an empty sequence."""
    if not len(lengths_B):  # a rank may have no sequence, which segment_reduce refuses
        return values_N.new_zeros(0)
    return torch.segment_reduce(values_N, "sum", lengths=lengths_B)


def max_by_sequence(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the largest of each sequence's tokens, [B] float; minus infinity for an empty one."""
    return torch.segment_reduce(values_N, "max", lengths=lengths_B)


def count_by_sequence(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return for how many tokens of each sequence a mask is True, [B] int64."""
    return sum_by_sequence(mask_N.double(), lengths_B).long()


def mean_by_sequence(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the mean over the tokens of each sequence that the mask keeps, [B]; 0 without any."""
    kept_N = values_N.masked_fill(~mask_N, 0)
    return sum_by_sequence(kept_N, lengths_B) / count_by_sequence(mask_N, lengths_B).clamp(min=1)


def spread_over_tokens(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Put a sequence's number on each of its tokens, [B] -> [N]."""
    return values_B.repeat_interleave(lengths_B)


def discounted_sums(values_N: Tensor, lengths_B: Tensor, decay: float) -> Tensor:
    """Return ``s_t = x_t + decay * s_{t+1}`` within each sequence, [N].

    A loop over positions: its k-th pass handles the tokens that k others of their sequence follow.
    """
    if not len(lengths_B):
        return torch.empty_like(values_N)
    # Longest first, so that the sequences with a k-th last token are the first ones of each pass
    order_B = lengths_B.argsort(descending=True, stable=True)
    last_B = (lengths_B.cumsum(0) - 1)[order_B]
    longer_K = len(lengths_B) - torch.bincount(lengths_B).cumsum(0)
    sums_N = torch.empty_like(values_N)
    running_B = values_N.new_zeros(len(lengths_B))
    # The last count is that of the sequences longer than the longest: 0
    for k, count in enumerate(longer_K.tolist()[:-1]):
        place = last_B[:count] - k
        running_B = values_N[place] + decay * running_B[:count]
        sums_N[place] = running_B
    return sums_N


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average the kept entries, [...] -> []; 0 if there are none."""
    return values.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)


def whiten(values_M: Tensor) -> Tensor:
    """Return ``(values - mean) / sqrt(var + 1e-8)``, [M], with Bessel's correction.

    Raises ValueError: fewer than two values, which have no variance.
    """
    count = len(values_M)
    if count < 2:
        raise ValueError(
            f"a variance over {count} tokens does not exist: whitening needs at least two response "
            "tokens in the batch"
        )
    deviation_M = values_M - values_M.sum() / count
    variance = deviation_M.square().sum() / (count - 1)
    return deviation_M * torch.rsqrt(variance + 1e-8)
