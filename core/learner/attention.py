"""Attention within each of several packed sequences, and of answers behind a prompt that they share.

All sequences of a pass lie in one row, without padding. This attention is registered with transformers: on a GPU
PyTorch's variable-length kernel, elsewhere scaled-dot-product attention, a call for sequences of similar lengths.
Attention alone reads more than a rank's own tokens where ranks split a sequence, so there, and only there, tokens are
exchanged for heads (Jacobs et al. 2023, arXiv:2309.14509). The exchange and its gradient are DTensor's. What lies where
in a pass is decided in ``packing.py``.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from core.errors import InputError

ATTENTION = "packed_rows"  # the name under which transformers finds attend
HEADS, TOKENS = 1, 2  # axes of the queries, keys and values that attend gets
MASK_CELLS = 2**24  # of a batch's attention mask, a byte each
Ends = tuple[Tensor, Tensor, int, int]  # of sequences among queries and keys, and the longest of each


def use_packed_attention(module: nn.Module, ranks: int) -> None:
    """Give the model the attention of this module. Raises InputError where it takes none from outside."""
    module.set_attn_implementation(ATTENTION)
    kind, heads = type(module).__name__, module.config.get_text_config().num_attention_heads
    if module.config._attn_implementation != ATTENTION:
        raise InputError(f"model.path: {kind} does not take its attention from outside; use another model")
    if heads % ranks:
        raise InputError(f"ulysses_sequence_parallel_size={ranks}: must divide the {heads} attention heads of {kind}")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_index: Tensor | None = None,
    sequence_mesh: DeviceMesh | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each sequence; without ``cu_seq_lens_q`` (their ends) transformers' own.

    A sequence may have keys in front of those of its own tokens. ``key_index`` are the tokens of all keys, where they
    are not those of the queries.

    Shapes:
        query       [1, H, n, D]   n tokens of this rank
        key, value  [1, K, n, D]   each of K heads serves H / K of the queries'
        result      [1, n, H, D]
    """
    if cu_seq_lens_q is None:  # a vision tower too: it gets its pictures one by one
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    odd = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if odd:
        raise InputError(f"model.path: attention of {type(module).__name__} needs {', '.join(odd)}; use another model")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # the kernels below are not on autocast's list, as PyTorch's attention is
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    if sequence_mesh is not None:
        key, value = (_enough_heads(one, sequence_mesh.size()) for one in (key, value))
        query, key, value = (_exchange(one, sequence_mesh, TOKENS, HEADS) for one in (query, key, value))
    if key_index is not None:
        key, value = (one.index_select(TOKENS, key_index) for one in (key, value))
    on_kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    by_sequences = _varlen if on_kernel else _by_length
    ends = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    out = by_sequences(query[0], key[0], value[0], ends, scaling, sliding_window)[None]
    if sequence_mesh is not None:
        out = _exchange(out, sequence_mesh, HEADS, TOKENS)
    return out.transpose(HEADS, TOKENS).contiguous(), None


def _enough_heads(value: Tensor, ranks: int) -> Tensor:
    """Repeat heads, so that each rank gets those that its queries need."""
    return value.repeat_interleave(ranks // math.gcd(value.shape[HEADS], ranks), dim=HEADS)


def _exchange(value: Tensor, mesh: DeviceMesh, joined: int, split: int) -> Tensor:
    """Return every rank's part of axis ``joined`` for a part of axis ``split``."""
    from torch.distributed.tensor import DTensor, Shard

    whole = DTensor.from_local(value, mesh, [Shard(joined)], run_check=False)
    return whole.redistribute(placements=[Shard(split)]).to_local()


def _varlen(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, window: int | None) -> Tensor:
    """Return [H, N, D] of query [H, N, D], key and value [K, N, D], by PyTorch's variable-length flash kernel.

    Where a sequence has more keys than queries its last query sees all of them: so flash-attn aligns them since 2.1.
    """
    from torch.nn.attention.varlen import varlen_attn

    parts = (one.transpose(0, 1) for one in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # older versions share keys without being told
        options["enable_gqa"] = True
    return varlen_attn(*parts, *ends, **options).transpose(0, 1)


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, window: int | None
) -> Tensor:
    """Return the same by a kernel that every device has.

    Sequences of similar lengths are padded to one batch of the kernel: a call for each takes a quarter longer.
    """
    lengths = tuple(zip(*(one.diff().tolist() for one in ends[:2]), strict=True))
    batches, cell_of_token = _batches(lengths, window, query.device)
    # A CPU's kernel takes twice as long for the gradient of short sequences in 16 bits as in 32
    dtype = query.dtype if query.is_cuda else torch.promote_types(query.dtype, torch.float32)
    q, k, v = (one.transpose(0, 1).to(dtype) for one in (query, key, value))
    options = {"scale": scale, **({"enable_gqa": True} if len(query) != len(key) else {})}
    out = []
    for queries, keys, mask in batches:
        parts = (one[cells].transpose(1, 2) for one, cells in ((q, queries), (k, keys), (v, keys)))
        found = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None, **options)
        out.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).index_select(0, cell_of_token).transpose(0, 1).to(query.dtype)


Batch = tuple[Tensor, Tensor, Tensor | None]


@functools.lru_cache(maxsize=4)  # each layer of a pass asks for the same ones
def _batches(
    lengths: tuple[tuple[int, int], ...], window: int | None, device: torch.device
) -> tuple[list[Batch], Tensor]:
    """Return batches of sequences with so many queries and keys, and [N] where each query is among their cells.

    Shapes (a batch of R sequences, at most Q queries and K keys each, padded behind their ends with any token):
        queries  [R, Q] int64  the token in each cell
        keys     [R, K] int64
        mask     [R, 1, Q, K] bool  the keys that a query sees; None: those up to its own place
    """
    own, read = torch.tensor(lengths).T
    alike: dict[tuple[int, int], list[int]] = {}
    for row, (queries, keys) in enumerate(lengths):
        alike.setdefault((_rounded_up(queries), _rounded_up(keys)), []).append(row)
    cell_of_token, cells, batches = torch.empty(int(own.sum()), dtype=torch.int64), 0, []
    for (most_queries, most_keys), numbers in alike.items():
        for rows in torch.tensor(numbers).split(max(1, MASK_CELLS // max(1, most_queries * most_keys))):
            queries, keys = _cells(own, rows), _cells(read, rows)
            real = torch.arange(queries.shape[1]) < own[rows, None]
            cell_of_token[queries[real]] = cells + real.flatten().nonzero()[:, 0]
            cells += real.numel()
            mask = _mask((read - own)[rows], queries.shape[1], keys.shape[1], window)
            batches.append((queries.to(device), keys.to(device), None if mask is None else mask.to(device)))
    return batches, cell_of_token.to(device)


def _rounded_up(length: int) -> int:
    """Return the next number of two binary digits and zeros: at most a half more than the length."""
    unit = 1 << max(length.bit_length() - 2, 0)
    return -(-length // unit) * unit


def _cells(number_B: Tensor, rows_R: Tensor) -> Tensor:
    """Return [R, longest]: the tokens of these sequences among those of all; behind a shorter one stands any."""
    start_R = (number_B.cumsum(0) - number_B)[rows_R]
    column = torch.arange(int(number_B[rows_R].max()))
    return (start_R[:, None] + column).clamp(max=int(number_B.sum()) - 1)


def _mask(ahead_R: Tensor, queries: int, keys: int, window: int | None) -> Tensor | None:
    """Return a batch's mask; ``ahead_R`` counts the keys before a sequence's own.

    A query in the padding sees what the last key sees: with no key at all its gradient would not be a number.
    """
    if not bool(ahead_R.any()) and (window is None or window >= keys):
        return None
    place = (ahead_R[:, None] + torch.arange(queries)).clamp(max=keys - 1)
    behind = place[..., None] - torch.arange(keys)
    return ((behind >= 0) & (behind < (window or keys)))[:, None]


AttentionInterface.register(ATTENTION, attend)
