"""Drawing one token a row, seeded by a counter and indifferent to what else is in the batch.

A row's randomness is a hash of (its seed, the position in its response): no generator has a state,
so a sample depends neither on its neighbours nor on the order in which rows are computed. Axes:
``N`` rows, ``V`` vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from core.engines.engine import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def uniforms(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each row: splitmix64 (Steele, Lea, Flood 2014), twice.

    The seed is mixed before the position is added, so that neighbouring seeds share no numbers.

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
) -> tuple[Tensor, Tensor, list[np.ndarray | None]]:
    """Return the next token of every row and its log-prob in the distribution it was drawn from.

    The token is the inverse of the distribution function at ``uniform_N``. The log-prob is NaN if
    the row has no finite distribution. The third result are the ids that truncation kept, of rows
    whose parameters ask for them.

    Shapes:
        logits_NV  [N, V], any float type
        uniform_N  [N] float64 in [0, 1)
        returns    [N] int64, [N] float32, N arrays of ids
    """
    logits_NV = processed_logits(logits_NV, params)
    prob_NV = logits_NV.softmax(-1)
    token_N = _inverse(prob_NV, uniform_N)
    greedy = [each.temperature == 0 for each in params]
    if any(greedy):
        greedy_N = token_N.new_tensor(greedy, dtype=torch.bool)
        token_N = torch.where(greedy_N, logits_NV.argmax(-1), token_N)
    logprob_N = prob_NV.gather(-1, token_N[:, None])[:, 0].log()
    return token_N, logprob_N, _kept_ids(logits_NV, params)


def _kept_ids(logits_NV: Tensor, params: Sequence[SamplingParams]) -> list[np.ndarray | None]:
    """Return the ids of finite logits, of each row that records them."""
    kept: list[np.ndarray | None] = [None] * len(params)
    recording = [row for row, each in enumerate(params) if each.records_kept]
    if recording:
        is_kept = logits_NV[recording] > -torch.inf
        ids = is_kept.nonzero()[:, 1].cpu().numpy()
        ends = is_kept.sum(-1).cumsum(0).tolist()
        for row, ids_of_row in zip(recording, np.split(ids, ends[:-1]), strict=True):
            kept[row] = ids_of_row
    return kept


def _inverse(prob_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return the first token whose running sum exceeds that share of all probability, [N] int64.

    Its block is found first, then its place in the block: a running sum over the vocabulary is slow
    on a CPU. Both are in float64, since in float32 rare tokens would be out of reach.
    """
    rows, vocab_size = prob_NV.shape
    width = 1 << round(math.log2(vocab_size) / 2)
    missing = -vocab_size % width
    if missing:
        prob_NV = F.pad(prob_NV, (0, missing))
    block_NSW = prob_NV.unflatten(1, (-1, width))
    sum_NS = block_NSW.sum(-1).double().cumsum(-1)
    target_N1 = uniform_N[:, None] * sum_NS[:, -1:]
    block_N1 = torch.searchsorted(sum_NS, target_N1, right=True)
    block_N1 = block_N1.clamp_(max=sum_NS.shape[1] - 1)  # NaN is beyond all
    before_N1 = F.pad(sum_NS, (1, 0)).gather(1, block_N1)
    prob_NW = block_NSW[torch.arange(rows, device=prob_NV.device), block_N1[:, 0]]
    sum_NW = prob_NW.double().cumsum(-1)
    # Rounding must not lift the target to the block's sum: tokens after it have probability 0
    last_N1 = torch.nextafter(sum_NW[:, -1:], torch.zeros_like(target_N1))
    target_in_block_N1 = torch.minimum(target_N1 - before_N1, last_N1)
    token_N1 = torch.searchsorted(sum_NW, target_in_block_N1, right=True)
    return (block_N1 * width + token_N1)[:, 0].clamp_(max=vocab_size - 1)


def processed_logits(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the logits of the distribution to sample from, [N, V] float32, -inf where cut off.

    Temperature comes first, then top-k (tokens equal to the k-th stay), then top-p: the smallest
    set of most probable tokens that holds that share of what is left. It is the order of
    transformers and vLLM. Greedy rows get temperature 1 and no truncation.
    """
    logits_NV = logits_NV.float()
    if any(each.temperature not in (0, 1) for each in params):
        temperatures = [each.temperature or 1.0 for each in params]
        logits_NV = logits_NV / logits_NV.new_tensor(temperatures)[:, None]
    cut_rows = [
        row
        for row, each in enumerate(params)
        if each.temperature and (each.top_k > 0 or each.top_p < 1)
    ]
    if not cut_rows:
        return logits_NV
    rows = logits_NV.new_tensor(cut_rows, dtype=torch.int64)
    top_k_N = rows.new_tensor([params[row].top_k for row in cut_rows])
    top_p = [params[row].top_p for row in cut_rows]
    # Infinite where top-p is off: a running sum may round to 1 before the last token
    top_p_N = torch.tensor([p if p < 1 else math.inf for p in top_p], dtype=torch.float64)
    top_p_N = top_p_N.to(rows.device)
    return logits_NV.index_copy(0, rows, _truncated(logits_NV[rows], top_k_N, top_p_N))


def _truncated(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Return the logits of each row, -inf where its top-k or top-p cuts off."""
    vocab_size = logits_NV.shape[1]
    if logits_NV.is_cpu:  # ten times as fast as PyTorch's, which orders indices, too
        ordered_NV = torch.from_numpy(np.sort(-logits_NV.numpy(), axis=1)).neg_()
    else:
        ordered_NV = logits_NV.sort(dim=1, descending=True).values
    last_N1 = torch.where(top_k_N > 0, top_k_N, vocab_size).clamp(max=vocab_size)[:, None] - 1
    ordered_NV.masked_fill_(ordered_NV < ordered_NV.gather(1, last_N1), -torch.inf)
    prob_NV = ordered_NV.softmax(-1)
    mass_before_NV = prob_NV.cumsum(-1, dtype=torch.float64) - prob_NV
    is_kept_NV = (mass_before_NV < top_p_N[:, None]) & (ordered_NV > -torch.inf)
    kept_N1 = is_kept_NV.sum(-1, keepdim=True)
    lowest_N1 = ordered_NV.gather(1, kept_N1.clamp(min=1) - 1)
    result_NV = logits_NV.masked_fill(logits_NV < lowest_N1, -torch.inf)
    # Of logits that equal the lowest one, those of the lowest ids stay
    above_N1 = (logits_NV > lowest_N1).sum(-1, keepdim=True)
    equal_NV = logits_NV == lowest_N1
    if bool((above_N1 + equal_NV.sum(-1, keepdim=True) > kept_N1).any()):
        is_surplus_NV = equal_NV & (equal_NV.cumsum(-1) > kept_N1 - above_N1)
        result_NV.masked_fill_(is_surplus_NV, -torch.inf)
    return result_NV
