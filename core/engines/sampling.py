"""Drawing one token a row, and what ends a response.

Every engine decides the end here, token by token, so that a trajectory's ``stop`` means the same
whoever sampled it: the end of sequence, a stop id, a stop string, or its limit, in this order. The
in-process engine draws here too, seeded by a counter and indifferent to what else is in the batch.

A row's randomness is a hash of (its seed, the position in its response): no generator has a state,
so a sample depends neither on its neighbours nor on the order in which rows are computed. Axes:
``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.engines import SamplingParams
from core.types import Stop

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def uniforms(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each row's seed and position: splitmix64 (Steele, Lea, Flood
    2014), twice.

    The seed is mixed before the position is added, so that neighbouring seeds share no stretch of
    numbers.

    Shapes:
        seed_N, position_N  [N] uint64
        returns             [N] float64, multiples of 2**-53
    """
    bits_N = _splitmix(_splitmix(seed_N) + position_N)
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = (x + np.uint64(1)) * _GOLDEN  # wraps around, as it should
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> np.uint64(31))


def draw(
    logits_NV: Tensor, params: Sequence[SamplingParams], uniform_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next token of every row and its log-prob under the distribution that it was drawn
    from.

    The token is the inverse of the distribution function at ``uniform_N``. The log-prob of a row
    without a finite distribution is NaN.

    Shapes:
        logits_NV  [N, V], any float type
        uniform_N  [N] float64 in [0, 1)
        returns    [N] int64, [N] float32
    """
    logits_NV = processed_logits(logits_NV, params)
    prob_NV = logits_NV.softmax(-1)
    token_N = _inverse(prob_NV, uniform_N)
    greedy = [one.temperature == 0 for one in params]
    if any(greedy):
        token_N = torch.where(
            token_N.new_tensor(greedy, dtype=torch.bool), logits_NV.argmax(-1), token_N
        )
    return token_N, prob_NV.gather(-1, token_N[:, None])[:, 0].log()


def _inverse(prob_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return the first token whose running sum of probabilities exceeds that share of the whole,
    [N] int64.

    Its block is found first, then its place there (a running sum over the vocabulary is slow on a
    CPU), both in float64: in float32 rare tokens would be out of reach.
    """
    rows, vocab_size = prob_NV.shape
    width = 1 << round(math.log2(vocab_size) / 2)
    if missing := -vocab_size % width:
        prob_NV = torch.nn.functional.pad(prob_NV, (0, missing))
    block_NSW = prob_NV.unflatten(1, (-1, width))
    sum_NS = block_NSW.sum(-1).double().cumsum(-1)
    target_N1 = uniform_N[:, None] * sum_NS[:, -1:]
    # NaN is beyond all
    block_N1 = torch.searchsorted(sum_NS, target_N1, right=True).clamp_(max=sum_NS.shape[1] - 1)
    before_N1 = torch.nn.functional.pad(sum_NS, (1, 0)).gather(1, block_N1)
    sum_NW = (
        block_NSW[torch.arange(rows, device=prob_NV.device), block_N1[:, 0]].double().cumsum(-1)
    )
    # Rounding must not lift the target to the block's sum: behind it there are only tokens of mass
    # 0.
    last_N1 = torch.nextafter(sum_NW[:, -1:], torch.zeros_like(target_N1))
    token_N1 = torch.searchsorted(sum_NW, torch.minimum(target_N1 - before_N1, last_N1), right=True)
    return (block_N1 * width + token_N1)[:, 0].clamp_(max=vocab_size - 1)


def processed_logits(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return logits after temperature, then top-k (ties with the k-th stay), then top-p of what is
    left (the smallest set of most probable tokens with at least that mass), in the order of
    transformers and vLLM; -inf for what was cut off. Greedy rows are as those of temperature 1
    without truncation. [N, V] float32."""
    logits_NV = logits_NV.float()
    if any(one.temperature not in (0, 1) for one in params):
        logits_NV = (
            logits_NV / logits_NV.new_tensor([one.temperature or 1.0 for one in params])[:, None]
        )
    size = logits_NV.shape[1]
    top_k = [min(one.top_k, size) if one.top_k > 0 and one.temperature else size for one in params]
    # Infinite where it is off: a running sum may round to 1 before the last token
    top_p = [one.top_p if one.top_p < 1 and one.temperature else math.inf for one in params]
    if min(top_k) == size and min(top_p) == math.inf:
        return logits_NV
    ordered_NV, index_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    kth_N1 = ordered_NV.gather(-1, index_NV.new_tensor(top_k)[:, None] - 1)
    ordered_NV = ordered_NV.masked_fill(ordered_NV < kth_N1, -torch.inf)
    prob_NV = ordered_NV.softmax(-1)
    mass_before_NV = prob_NV.cumsum(-1, dtype=torch.float64) - prob_NV
    cut_NV = mass_before_NV >= mass_before_NV.new_tensor(top_p)[:, None]
    return torch.empty_like(logits_NV).scatter_(
        -1, index_NV, ordered_NV.masked_fill(cut_NV, -torch.inf)
    )


# -- what ends a response --------------------------------------------------------------------------


class StopRule:
    """Decides when a response ends: one rule a request, asked after every token."""

    def __init__(self, sampling: SamplingParams, eos: frozenset[int], tokenizer: Any):
        self.eos = frozenset() if sampling.ignore_eos else eos
        self.stop_ids, self.strings = frozenset(sampling.stop_token_ids), sampling.stop
        self.max_tokens, self.tokenizer = sampling.max_tokens, tokenizer
        # Tokens that the last stop string can be spread over, one a byte, and some more: a
        # tokenizer may decode the first ones otherwise than in the middle of a text, and special
        # ones have no text.
        self.tail = 4 * max(map(len, self.strings), default=0) + 16

    def ended(self, ids: Sequence[int]) -> Stop | None:
        """Return why ``ids``, all tokens of the response so far, are the whole response; None where
        they are not."""
        if ids[-1] in self.eos:
            return Stop.EOS
        if ids[-1] in self.stop_ids:
            return Stop.STOP_TOKEN
        if self.strings:
            text = self.tokenizer.decode(ids[-self.tail :], skip_special_tokens=True)
            if any(stop in text for stop in self.strings):
                return Stop.STOP_STRING
        return Stop.LENGTH if len(ids) >= self.max_tokens else None
