"""Drawing one token a row, and what ends a response.

Every engine decides the end here, token by token, so that a trajectory's ``stop`` means the same whoever sampled it:
the end of sequence, a stop id, a stop string, or its limit, in this order. The in-process engine draws here too, seeded
by a counter and indifferent to what else is in the batch.

A row's randomness is a hash of (its seed, the position in its response): no generator has a state, so
a sample depends neither on its neighbours nor on the order in which rows are computed.
Axes: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.data.vocabulary import end_ids
from core.engines import SamplingParams
from core.types import Stop

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


def uniforms(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each row's seed and position: splitmix64 (Steele, Lea, Flood 2014), twice.

    The seed is mixed before the position is added, so that neighbouring seeds share no stretch of numbers.

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


@dataclass(frozen=True)
class RowSettings:
    """How each row is sampled, as tensors [N]. Greedy rows have temperature 1 and no truncation here: their log-probs
    are those of the full distribution."""

    temperature_N: Tensor
    top_k_N: Tensor  # the vocabulary's size where it is off
    top_p_N: Tensor  # infinite where it is off: a running sum may round to 1 before the last token
    greedy_N: Tensor
    truncates: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> RowSettings:
        greedy = [p.temperature == 0 for p in params]
        top_k = [vocab_size if p.top_k < 0 or p.temperature == 0 else min(p.top_k, vocab_size) for p in params]
        top_p = [p.top_p if p.top_p < 1 and p.temperature else math.inf for p in params]
        return cls(
            torch.tensor([p.temperature or 1.0 for p in params], device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor(greedy, device=device),
            min(top_k) < vocab_size or min(top_p) < math.inf,
        )


def draw(logits_NV: Tensor, settings: RowSettings, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next token of every row and its log-prob under the distribution that it was drawn from.

    The token is the inverse of the distribution function at ``uniform_N``. The log-prob of a row without a finite
    distribution is NaN.

    Shapes:
        logits_NV  [N, V], any float type
        uniform_N  [N] float64 in [0, 1)
        returns    [N] int64, [N] float32
    """
    logits_NV = processed_logits(logits_NV, settings)
    prob_NV = logits_NV.softmax(-1)
    token_N = _inverse(prob_NV, uniform_N)
    if settings.greedy_N.any():
        token_N = torch.where(settings.greedy_N, logits_NV.argmax(-1), token_N)
    return token_N, prob_NV.gather(-1, token_N[:, None])[:, 0].log()


def _inverse(prob_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return the first token whose running sum of probabilities exceeds that share of the whole, [N] int64.

    Its block is found first, then its place there (a running sum over the vocabulary is slow on a CPU), both in
    float64: in float32 rare tokens would be out of reach.
    """
    rows, vocab_size = prob_NV.shape
    width = 1 << round(math.log2(vocab_size) / 2)
    if missing := -vocab_size % width:
        prob_NV = torch.nn.functional.pad(prob_NV, (0, missing))
    block_NSW = prob_NV.unflatten(1, (-1, width))
    sum_NS = block_NSW.sum(-1).double().cumsum(-1)
    target_N1 = uniform_N[:, None] * sum_NS[:, -1:]
    block_N1 = torch.searchsorted(sum_NS, target_N1, right=True).clamp_(max=sum_NS.shape[1] - 1)  # NaN is beyond all
    before_N1 = torch.nn.functional.pad(sum_NS, (1, 0)).gather(1, block_N1)
    sum_NW = block_NSW[torch.arange(rows, device=prob_NV.device), block_N1[:, 0]].double().cumsum(-1)
    # Rounding must not lift the target to the block's sum: behind it there are only tokens of mass 0.
    last_N1 = torch.nextafter(sum_NW[:, -1:], torch.zeros_like(target_N1))
    token_N1 = torch.searchsorted(sum_NW, torch.minimum(target_N1 - before_N1, last_N1), right=True)
    return (block_N1 * width + token_N1)[:, 0].clamp_(max=vocab_size - 1)


def processed_logits(logits_NV: Tensor, settings: RowSettings) -> Tensor:
    """Return logits after temperature, then top-k (ties with the k-th stay), then top-p of what is left (the smallest
    set of most probable tokens with at least that mass), in the order of transformers and vLLM; -inf for what was cut
    off. [N, V] float32."""
    logits_NV = logits_NV.float()
    if (settings.temperature_N != 1).any():
        logits_NV = logits_NV / settings.temperature_N[:, None]
    if not settings.truncates:
        return logits_NV
    ordered_NV, index_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    kth_N1 = ordered_NV.gather(-1, settings.top_k_N[:, None] - 1)
    ordered_NV = ordered_NV.masked_fill(ordered_NV < kth_N1, -torch.inf)
    prob_NV = ordered_NV.softmax(-1)
    mass_before_NV = prob_NV.cumsum(-1, dtype=torch.float64) - prob_NV
    ordered_NV = ordered_NV.masked_fill(mass_before_NV >= settings.top_p_N[:, None], -torch.inf)
    return torch.empty_like(logits_NV).scatter_(-1, index_NV, ordered_NV)


# -- what ends a response ---------------------------------------------------------------------------


def eos_ids(tokenizer: Any, model: Any = None) -> frozenset[int]:
    """Return the ids that end a response: :func:`core.data.vocabulary.end_ids` of the model's generation config."""
    return end_ids(tokenizer, getattr(model, "generation_config", None))


class StopRule:
    """Decides when a response ends: one rule a request, asked after every token."""

    def __init__(self, sampling: SamplingParams, eos: frozenset[int], tokenizer: Any):
        self.eos = frozenset() if sampling.ignore_eos else eos
        self.stop_ids, self.strings = frozenset(sampling.stop_token_ids), sampling.stop
        self.max_tokens, self.tokenizer = sampling.max_tokens, tokenizer
        # Tokens that the last stop string can be spread over, one a byte, and some more: a tokenizer may decode the
        # first ones otherwise than in the middle of a text, and special ones have no text.
        self.tail = 4 * max(map(len, self.strings), default=0) + 16

    def ended(self, ids: Sequence[int]) -> Stop | None:
        """Return why ``ids``, all tokens of the response so far, are the whole response; None where they are not."""
        if ids[-1] in self.eos:
            return Stop.EOS
        if ids[-1] in self.stop_ids:
            return Stop.STOP_TOKEN
        if self.strings:
            text = self.tokenizer.decode(ids[-self.tail :], skip_special_tokens=True)
            if any(stop in text for stop in self.strings):
                return Stop.STOP_STRING
        return Stop.LENGTH if len(ids) >= self.max_tokens else None
