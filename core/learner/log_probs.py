"""Log-probs and entropies of the output head without the logits of the whole batch.

Logits of 4,096 tokens and a 128k vocabulary are 2 GiB in float32, several times over with softmax
and gradient. Here a chunk of tokens at a time is projected, reduced to two numbers a token, and
projected again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.learner.step_settings import head_logits

# The logit of an id that is never sampled. With -inf an entropy would be NaN, by 0 * log 0.
NEVER = -1e9
# Logits of ids that truncation cut off are so far below the highest: their share, 1e-26, is nothing
# beside 1. exp() of lower numbers underflows, and is then twenty times slower on a CPU.
FAR = 60.0


class KeptIds(NamedTuple):
    """The ids that truncation kept for each of N tokens, one token after another."""

    ids: Tensor  # [K] int64
    counts: Tensor  # [N] int64; a token with 0 ids has the whole vocabulary

    def of_tokens(self, part: slice) -> KeptIds:
        """Return the ids of some tokens."""
        counts = self.counts[part]
        first = int(self.counts[: part.start].sum())
        return KeptIds(self.ids[first : first + int(counts.sum())], counts)

    def chunks(self, rows: int) -> list[KeptIds]:
        """Return the ids of every ``rows`` tokens."""
        counts = self.counts.split(rows)
        sizes = torch.stack([part.sum() for part in counts]).tolist()
        return [*map(KeptIds, self.ids.split(sizes), counts)]


def token_log_probs_and_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    kept: KeptIds | None = None,
    chunk_elements: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each label and the entropy of each distribution.

    A distribution is ``softmax((hidden @ weight.T + bias) / temperature)``, computed in float32, or
    in float64 for float64 inputs. With ``kept`` it is over the ids that truncation kept, as the
    engine sampled (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Gradients reach ``hidden``,
    ``weight`` and ``bias`` through the log-probs, and through the entropies with ``entropy_grad``.
    Weight gradients of lower precision are summed over chunks in float32.

    ``chunk_elements`` changes only memory and speed: about three tensors of so many logits exist at
    a time, beside inputs, outputs and gradients. By default the device decides.

    Shapes:
        hidden_NH  [N, H] float
        weight_VH  [V, H] float  cast to hidden's dtype where it differs
        labels_N   [N]    int64
        bias       [V]    float
        results    [N] each, float32, or float64
    """
    if chunk_elements is None:
        chunk_elements = logits_at_a_time(hidden_NH.device)
    weight_VH = weight_VH.to(hidden_NH.dtype)
    ids, counts = kept or (None, None)
    return _ChunkedHead.apply(
        hidden_NH, weight_VH, bias, labels_N, ids, counts, temperature, chunk_elements, entropy_grad
    )


def logits_at_a_time(device: torch.device) -> int:
    """Return how many logits exist at a time, by the kind and the size of a device alone."""
    if device.type != "cuda":
        return head_logits(None)
    return head_logits(torch.cuda.get_device_properties(device).total_memory)


class _ChunkedHead(torch.autograd.Function):
    # Products are in the inputs' precision and reductions in float32: autocast must not choose
    # again, and must not choose differently in the two passes.

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, labels, ids, counts, temperature, elements, entropy_grad
    ):
        rows = max(1, elements // weight.shape[0])
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_prob, entropy, normaliser = (
            torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3)
        )
        log_probs = None
        with torch.autocast(hidden.device.type, enabled=False):
            for part, kept in _chunks_with_kept(len(hidden), rows, ids, counts):
                logits = _logits(hidden[part], weight, bias, temperature, dtype, kept)
                normaliser[part] = logits.logsumexp(-1)
                log_probs = logits.sub_(normaliser[part, None])
                log_prob[part] = log_probs.gather(1, labels[part, None])[:, 0]
                probs = log_probs.exp()
                entropy[part] = -torch.linalg.vecdot(probs, log_probs)
        # If one chunk is all, the backward pass need not compute its log-softmax again
        only_chunk = log_probs if any(ctx.needs_input_grad) and len(hidden) <= rows else None
        read_entropy = entropy if entropy_grad else None
        ctx.save_for_backward(
            hidden, weight, bias, labels, ids, counts, normaliser, read_entropy, only_chunk
        )
        ctx.temperature = temperature
        ctx.rows = rows
        ctx.elements = elements
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        hidden, weight, bias, labels, ids, counts, normaliser, entropy, only_chunk = (
            ctx.saved_tensors
        )
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        dtype = normaliser.dtype
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if for_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part, kept in _chunks_with_kept(len(hidden), ctx.rows, ids, counts):
                if only_chunk is None:
                    logits = _logits(hidden[part], weight, bias, ctx.temperature, dtype, kept)
                    log_probs = logits.sub_(normaliser[part, None])
                else:
                    log_probs = only_chunk.clone()
                # In the tempered logits z: d log p_label / dz_j = [j = label] - p_j,
                # and dH / dz_j = -p_j (log p_j + H)
                of_label = grad_log_prob[part, None] / ctx.temperature
                if entropy is None:
                    probs = log_probs.exp_()
                    scale = -of_label
                else:
                    probs = log_probs.exp()
                    of_entropy = grad_entropy[part, None] / ctx.temperature
                    scale = log_probs.add_(entropy[part, None]).mul_(-of_entropy).sub_(of_label)
                grad = probs.mul_(scale).scatter_add_(1, labels[part, None], of_label)
                if for_bias:
                    grad_bias += grad.sum(0)
                grad = grad.to(hidden.dtype)
                if for_hidden:
                    torch.mm(grad, weight, out=grad_hidden[part])
                if for_weight:
                    _accumulate(grad_weight, grad, hidden[part], ctx.elements)
        if for_weight:
            grad_weight = grad_weight.to(weight.dtype)
        if for_bias:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 6


def _chunks(total: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, total)) for start in range(0, total, rows))


def _chunks_with_kept(
    total: int, rows: int, ids: Tensor | None, counts: Tensor | None
) -> Iterator[tuple[slice, KeptIds | None]]:
    """Yield the chunks of all tokens, each with the ids that truncation kept."""
    if counts is None or not total:
        return ((part, None) for part in _chunks(total, rows))
    return zip(_chunks(total, rows), KeptIds(ids, counts).chunks(rows), strict=True)


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
    kept: KeptIds | None,
) -> Tensor:
    logits = (hidden @ weight.T).to(dtype)
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits.div_(temperature)
    if kept is not None:
        ids, counts = kept
        rows = torch.arange(len(counts), device=ids.device)
        rows = rows.repeat_interleave(counts, output_size=len(ids))
        values = logits[rows, ids]
        highest = logits.new_full((len(counts),), -torch.inf)
        floor = highest.scatter_reduce_(0, rows, values, "amax").sub_(FAR)
        torch.where((counts > 0)[:, None], floor[:, None], logits, out=logits)
        logits[rows, ids] = values
    return logits


def _accumulate(total_VH: Tensor, grad_NV: Tensor, hidden_NH: Tensor, elements: int) -> None:
    """Add ``grad.T @ hidden``; in blocks of ``elements`` numbers if precisions differ."""
    if total_VH.dtype == grad_NV.dtype:
        total_VH.addmm_(grad_NV.T, hidden_NH)
        return
    block = max(1, elements // max(hidden_NH.shape[1], 1))
    for part in _chunks(len(total_VH), block):
        total_VH[part] += grad_NV[:, part].T @ hidden_NH
