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

from core.data.vocabulary import REPLACEMENT, end_ids
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
    """How each row is sampled, as tensors.

    Greedy rows have temperature 1 and no truncation here: their log-probs are those of the full distribution.
    """

    temperature_N: Tensor
    top_k_N: Tensor  # the vocabulary's size where it is off
    top_p_N: Tensor  # 1 where it is off
    greedy_N: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> RowSettings:
        rows = len(params)
        if len(set(map(id, params))) == 1:  # the usual case, and the reason for expand below
            params = params[:1]
        greedy = [p.temperature == 0 for p in params]
        heat = [p.temperature or 1.0 for p in params]
        top_k = [vocab_size if p.top_k < 0 or p.temperature == 0 else min(p.top_k, vocab_size) for p in params]
        top_p = [1.0 if p.temperature == 0 else p.top_p for p in params]
        formats = (torch.float32, torch.int64, torch.float64, torch.bool)
        columns = zip((heat, top_k, top_p, greedy), formats, strict=True)
        return cls(*(torch.tensor(values, dtype=dtype, device=device).expand(rows) for values, dtype in columns))


def draw(logits_NV: Tensor, settings: RowSettings, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next token of every row and its log-prob under the distribution that it was drawn from.

    Temperature, then top-k, then top-p of what is left, in the order of transformers and vLLM. The token is the
    inverse of the distribution function at ``uniform_N``. The log-prob of a row without a finite distribution is NaN.

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


def processed_logits(logits_NV: Tensor, settings: RowSettings) -> Tensor:
    """Return logits after temperature, top-k and top-p, -inf for what was cut off. [N, V] float32."""
    logits_NV = logits_NV.float()
    if (settings.temperature_N != 1).any():
        logits_NV = logits_NV / settings.temperature_N[:, None]
    logits_NV = _keep_top_k(logits_NV, settings.top_k_N)
    return _keep_top_p(logits_NV, settings.top_p_N)


def _keep_top_k(logits_NV: Tensor, top_k_N: Tensor) -> Tensor:
    """Set what is below the k-th largest logit to -inf; ties with it stay."""
    cut = (top_k_N < logits_NV.shape[1]).nonzero()[:, 0]
    if not len(cut):
        return logits_NV
    logits_kept, k = logits_NV[cut], top_k_N[cut]
    largest = logits_kept.topk(int(k.max()), dim=-1).values
    logits_kept = logits_kept.masked_fill(logits_kept < largest.gather(-1, k[:, None] - 1), -torch.inf)
    return logits_NV.index_copy(0, cut, logits_kept)


def _keep_top_p(logits_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Set what is outside the smallest set of most probable tokens with at least ``top_p`` of the mass to -inf."""
    cut = (top_p_N < 1).nonzero()[:, 0]
    if not len(cut):
        return logits_NV
    ordered, index = logits_NV[cut].sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1, dtype=torch.float64) - probs
    ordered = ordered.masked_fill(mass_before >= top_p_N[cut, None], -torch.inf)
    return logits_NV.index_copy(0, cut, torch.empty_like(ordered).scatter_(-1, index, ordered))


def _inverse(prob_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return the token at ``uniform_N`` of each row's cumulated probabilities: first its block, then within it.

    A running sum over the vocabulary is slow on a CPU and, in float32, blind to rare tokens; sums of about
    sqrt(V) blocks and a running sum over one block, both in float64, are neither.
    """
    vocab_size = prob_NV.shape[1]
    width = 1 << round(math.log2(vocab_size) / 2)
    whole = vocab_size - vocab_size % width
    block_NS = prob_NV[:, :whole].unflatten(1, (-1, width)).sum(-1)
    if whole < vocab_size:
        block_NS = torch.cat([block_NS, prob_NV[:, whole:].sum(-1, keepdim=True)], 1)
    block_N1, before_N1, target_N1 = _search(block_NS.double(), uniform_N[:, None] * block_NS.double().sum(-1, True))
    token_NW = block_N1 * width + torch.arange(width, device=prob_NV.device)
    inner_NW = prob_NV.gather(1, token_NW.clamp(max=vocab_size - 1)).double()
    inner_NW = inner_NW.masked_fill_(token_NW >= vocab_size, 0)
    inner_N1 = _search(inner_NW, target_N1 - before_N1)[0]
    return token_NW.gather(1, inner_N1)[:, 0].clamp_(max=vocab_size - 1)  # beyond the end for NaN alone


def _search(mass_NS: Tensor, target_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first cell whose running sum exceeds the target, the sum before that cell, and the target used."""
    sum_NS = mass_NS.cumsum(-1)
    total_N1 = sum_NS[:, -1:]
    # Rounding must not lift the target to the total: behind it there is no cell, or only cells of mass 0.
    target_N1 = torch.minimum(target_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    cell_N1 = torch.searchsorted(sum_NS, target_N1, right=True).clamp_(max=mass_NS.shape[1] - 1)
    return cell_N1, sum_NS.gather(1, cell_N1) - mass_NS.gather(1, cell_N1), target_N1


# -- what ends a response ---------------------------------------------------------------------------


def eos_ids(tokenizer: Any, model: Any = None) -> frozenset[int]:
    """Return the ids that end a response: :func:`core.data.vocabulary.end_ids` of the model's generation config."""
    return end_ids(tokenizer, getattr(model, "generation_config", None))


class StopRule:
    """Decides when one response ends. It follows the response: one rule a request, applied after every token."""

    def __init__(self, sampling: SamplingParams, eos: frozenset[int], tokenizer: Any):
        self.eos = frozenset() if sampling.ignore_eos else eos
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.strings = StopStrings(tokenizer, sampling.stop) if sampling.stop else None
        self.max_tokens = sampling.max_tokens

    def ended(self, ids: Sequence[int]) -> Stop | None:
        """Return why ``ids``, all tokens of the response so far, are the whole response; None where they are not."""
        if ids[-1] in self.eos:
            return Stop.EOS
        if ids[-1] in self.stop_ids:
            return Stop.STOP_TOKEN
        if self.strings is not None and self.strings.completed(ids):
            return Stop.STOP_STRING
        return Stop.LENGTH if len(ids) >= self.max_tokens else None


class StopStrings:
    """Finds the token that completes a stop string. Only the tail of the response is decoded each time.

    Text is taken from the difference between two decodings that start at the same earlier token, because a
    tokenizer may decode a token differently at the start of a text than in its middle.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.keep = max(map(len, stop)) - 1  # characters of earlier text that a match can reach back to
        self.begin = self.read = 0  # ids[begin:read] are decoded already, their text is ``known``
        self.tail = self.known = ""

    def completed(self, ids: Sequence[int]) -> bool:
        """Return whether the last token completed a stop string. Call it after every token, with all ids."""
        text = self.tokenizer.decode(ids[self.begin :], skip_special_tokens=True)
        window = self.tail + text[len(self.known) :]
        if any(stop in window for stop in self.stop):
            return True
        if not text.endswith(REPLACEMENT):  # else the bytes of a character are not complete yet
            self.tail = window[-self.keep :] if self.keep else ""
            self.begin, self.read = self.read, len(ids)
            self.known = self.tokenizer.decode(ids[self.begin : self.read], skip_special_tokens=True)
        return False
