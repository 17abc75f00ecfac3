"""Attention within each of several sequences, and of answers that share a prompt.

Packed sequences go through transformers' attention interface: on a GPU PyTorch's variable-length kernel (or flash-attn,
where ``override_config.attn_implementation`` names it), elsewhere scaled-dot-product attention, a call for sequences of
similar lengths. Attention alone reads more than a rank's own tokens where ranks split a sequence, so there, and only
there, tokens are exchanged for heads (Jacobs et al. 2023, arXiv:2309.14509). The exchange and its gradient are
DTensor's.

The plain pass repeats a group's prompt for each of its G answers. A shared prompt is read once, and the answers attend
to its keys and values, through which gradients flow back. Prompts and answers lie in one pass, because sharded weights
are gathered once a pass. Only a learner alone with padded sequences reads the prompts in a pass of their own and keeps
their keys in a cache, as the published runs of the labs did. Either result is that of the plain pass up to rounding.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from core.errors import InputError
from core.types import Media
from core.vision.modality import TEXT, Modality

ATTENTION = "packed_rows"  # the name under which transformers finds attend
HEADS, TOKENS = 1, 2  # axes of the queries, keys and values that attend gets


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
    shared_prompts: SharedPrompts | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each sequence; without ``cu_seq_lens_q`` (their ends) transformers' own.

    A sequence may have keys in front of those of its own tokens. ``key_index`` are the tokens of all keys, where they
    are not those of the queries; ``shared_prompts`` are those of padded sequences.

    Shapes:
        query       [1, H, n, D]   n tokens of this rank
        key, value  [1, K, n, D]   each of K heads serves H / K of the queries'
        result      [1, n, H, D]
    """
    if shared_prompts is not None:
        return _behind_prompts(module, query, key, value, shared_prompts, scaling=scaling, **others), None
    if cu_seq_lens_q is None:  # a vision tower too: it gets its pictures one by one
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    odd = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if odd:
        raise InputError(f"use_remove_padding: {type(module).__name__} needs {', '.join(odd)}; set it to False")
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


def _behind_prompts(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts, **options: Any
) -> Tensor:
    """Return [1, N, H, D] of query, key and value [1, H, N, D]: prompts, then the answers that continue them.

    Padding is added for attention alone, and taken away behind it.
    """
    cut = len(shared.first_P) * shared.width

    def split(one: Tensor) -> tuple[Tensor, Tensor]:
        cells = one[0].transpose(0, 1).index_select(0, shared.token_of_cell)
        parts = cells[:cut].unflatten(0, (-1, shared.width)), cells[cut:].unflatten(0, (-1, shared.length))
        return tuple(part.transpose(1, 2) for part in parts)

    prompts, answers = zip(*map(split, (query, key, value)), strict=True)
    of_prompts, _ = sdpa_attention_forward(module, *prompts, None, **options)
    keys, values = (
        torch.cat([one.index_select(0, shared.place_B), own], dim=TOKENS)
        for one, own in zip(prompts[1:], answers[1:], strict=True)
    )
    of_answers, _ = sdpa_attention_forward(module, answers[0], keys, values, shared.attention, **options)
    return torch.cat([of_prompts.flatten(0, 1), of_answers.flatten(0, 1)]).index_select(0, shared.cell_of_token)[None]


Ends = tuple[Tensor, Tensor, int, int]  # of sequences among queries and keys, and the longest of each


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, window: int | None
) -> Tensor:
    """Return [H, N, D] of query [H, N, D], key and value [K, N, D], by a kernel that every device has.

    Sequences of similar lengths are padded to one batch of the kernel: a call for each takes a quarter longer.
    """
    lengths = zip(*(one.diff().tolist() for one in ends[:2]), strict=True)
    batches, cell_of_token = _batches(tuple(lengths), window, query.device)
    options = {"enable_gqa": True} if len(query) != len(key) else {}
    dtype = query.dtype
    # A CPU's kernel takes twice as long for the gradient of short sequences in 16 bits as in 32
    kernel_dtype = dtype if query.is_cuda else torch.promote_types(dtype, torch.float32)
    parts, out = [one.transpose(0, 1).to(kernel_dtype) for one in (query, key, value)], []
    for batch in batches:
        cells = batch.queries, batch.keys, batch.keys
        three = (one[index].transpose(1, 2) for one, index in zip(parts, cells, strict=True))
        options |= {"attn_mask": batch.mask, "is_causal": batch.mask is None}
        out.append(F.scaled_dot_product_attention(*three, scale=scale, **options).transpose(1, 2).flatten(0, 1))
    return torch.cat(out).index_select(0, cell_of_token).transpose(0, 1).to(dtype)


MASK_CELLS = 2**24  # of a batch's attention mask, a byte each


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences of similar lengths, padded behind their ends for one call of a kernel.

    Shapes (R sequences, at most Q queries and K keys each):
        queries  [R, Q] int64  the token in each cell, any in the padding
        keys     [R, K] int64
        mask     [R, 1, Q, K] bool  the keys that a query sees; None: those up to its own place
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@functools.lru_cache(maxsize=4)  # each layer of a pass asks for the same ones
def _batches(
    lengths: tuple[tuple[int, int], ...], window: int | None, device: torch.device
) -> tuple[list[AttentionBatch], Tensor]:
    """Return batches of sequences with so many queries and keys, and [N] where each query is among their cells."""
    count, total = torch.tensor(lengths).T
    cell_of_token, cells, batches = torch.empty(int(count.sum()), dtype=torch.int64), 0, []
    for rows in _alike(lengths):
        queries, keys = (_cells(number, rows) for number in (count, total))
        real = torch.arange(queries.shape[1]) < count[rows, None]
        cell_of_token[queries[real]] = cells + real.flatten().nonzero()[:, 0]
        cells += real.numel()
        mask = _mask((total - count)[rows], queries.shape[1], keys.shape[1], window)
        batches.append(AttentionBatch(*(one if one is None else one.to(device) for one in (queries, keys, mask))))
    return batches, cell_of_token.to(device)


def _alike(lengths: tuple[tuple[int, int], ...]) -> Iterator[Tensor]:
    """Yield the rows whose lengths are about the same, as many as one batch may have."""
    alike: dict[tuple[int, int], list[int]] = {}
    for row, (own, read) in enumerate(lengths):
        alike.setdefault((_rounded_up(own), _rounded_up(read)), []).append(row)
    for (own, read), rows in alike.items():
        yield from torch.tensor(rows).split(max(1, MASK_CELLS // max(1, own * read)))


def _cells(number_B: Tensor, rows_R: Tensor) -> Tensor:
    """Return [R, longest]: the tokens of these sequences among those of all; behind a shorter one stands any."""
    start_R = (number_B.cumsum(0) - number_B)[rows_R]
    column = torch.arange(int(number_B[rows_R].max()))
    return (start_R[:, None] + column).clamp(max=int(number_B.sum()) - 1)


def _mask(ahead_R: Tensor, queries: int, keys: int, window: int | None) -> Tensor | None:
    """Return an :class:`AttentionBatch`'s mask; ``ahead_R`` counts the keys before a sequence's own.

    A query in the padding sees what the last key sees: with no key at all its gradient would not be a number.
    """
    if not bool(ahead_R.any()) and (window is None or window >= keys):
        return None
    place = (ahead_R[:, None] + torch.arange(queries)).clamp(max=keys - 1)
    behind = place[..., None] - torch.arange(keys)
    return ((behind >= 0) & (behind < (window or keys)))[:, None]


def _rounded_up(length: int) -> int:
    """Return the next number of two binary digits and zeros: at most a half more than the length."""
    unit = 1 << max(length.bit_length() - 2, 0)
    return -(-length // unit) * unit


def _varlen(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, window: int | None) -> Tensor:
    """Return the same by PyTorch's flash kernel for sequences of unequal length; 16-bit precision on a GPU.

    Where a sequence has more keys than queries its last query sees all of them: so flash-attn aligns them since 2.1.
    """
    from torch.nn.attention.varlen import varlen_attn

    parts = (one.transpose(0, 1) for one in (query, key, value))
    reach = (-1 if window is None else window - 1, 0)
    options = {"scale": scale, "window_size": reach, **_grouped(varlen_attn)}
    return varlen_attn(*parts, *ends, **options).transpose(0, 1)


@functools.cache
def _grouped(kernel: Any) -> dict[str, bool]:
    """Return the option that newer versions of PyTorch need where heads share keys; older ones have none."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


AttentionInterface.register(ATTENTION, attend)


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Return [sum of counts] int64: ``starts[0], starts[0] + 1, ...``, then the numbers from ``starts[1]`` on, ..."""
    offset = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return torch.arange(len(offset), device=starts.device) + offset


def places(lengths_B: Tensor) -> Tensor:
    """Return [N] int64: each token's place in its sequence."""
    return ranges(torch.zeros_like(lengths_B), lengths_B)


WORTH_IT = 0.85  # of the plain pass's tokens: a second pass and a mask in memory cost something, too
MASK_ELEMENTS = 2**28  # of the second pass's attention mask, a byte each


@dataclass(frozen=True)
class SharedPrompts:
    """The sequences that continue each prompt. The last token of a prompt is the first input of its answers.

    Shapes (B sequences, P prompts):
        first_P   [P] a sequence that begins with the prompt
        place_B   [B] the sequence's prompt
        start_B   [B] the sequence's first token among all tokens
        prefix_B  [B] tokens of the prompt but its last one
        length_B  [B] tokens of the sequence behind its prefix, but the last one
        width     the longest prefix
    """

    first_P: Tensor
    place_B: Tensor
    start_B: Tensor
    prefix_B: Tensor
    length_B: Tensor
    width: int

    @classmethod
    def of(
        cls, ids_N: Tensor, mask_N: Tensor, lengths_B: Tensor, group_B: Tensor, *, packed: bool = False
    ) -> SharedPrompts | None:
        """Return None where sharing does not pay, a sequence has nothing that the policy wrote, or a group's differ.

        A prompt ends before the first token of the mask; all sequences of a group must begin with the same one.
        ``packed`` sequences have no padding, and no mask in memory.
        """
        count, sequence_N = (
            len(lengths_B),
            torch.arange(len(lengths_B), device=ids_N.device).repeat_interleave(lengths_B),
        )
        written_B = torch.bincount(sequence_N[mask_N], minlength=count)
        if not count or not bool((written_B > 0).all()):
            return None
        _, place_B = torch.unique(group_B, return_inverse=True)
        prompts = int(place_B.max()) + 1
        number_B = torch.arange(count, device=ids_N.device)
        first_P = torch.full((prompts,), count, device=ids_N.device).scatter_reduce(0, place_B, number_B, "amin")
        place_N, start_B = places(lengths_B), lengths_B.cumsum(0) - lengths_B
        written_M, end_B = place_N[mask_N], written_B.cumsum(0)
        prefix_B, last_B = written_M[end_B - written_B] - 1, written_M[end_B - 1]
        first_B = first_P[place_B]  # the sequence whose prompt is read
        if not torch.equal(prefix_B, prefix_B[first_B]):
            return None
        in_prefix_N = place_N < prefix_B[sequence_N]
        twin_N = (start_B[first_B][sequence_N] + place_N)[in_prefix_N]
        if not torch.equal(ids_N[in_prefix_N], ids_N[twin_N]):
            return None
        one = cls(first_P, place_B, start_B, prefix_B, last_B - prefix_B, int(prefix_B.max()))
        if packed:
            plain, shared = int(last_B.sum()) + count, int(prefix_B[first_P].sum() + one.length_B.sum())
        else:
            plain, shared = count * int(lengths_B.max()), prompts * one.width + count * one.length
        fits = packed or count * one.length * (one.width + one.length) <= MASK_ELEMENTS
        return one if fits and int(prefix_B.min()) > 0 and shared <= WORTH_IT * plain else None

    @functools.cached_property
    def length(self) -> int:
        """Return the largest of ``length_B``."""
        return int(self.length_B.max())

    def prompts(self, ids_N: Tensor) -> Tensor:
        """Return [P, width]: the ids of the prefixes; behind a shorter one stands anything."""
        column = torch.arange(self.width, device=ids_N.device)
        return ids_N[(self.start_B[self.first_P][:, None] + column).clamp(max=len(ids_N) - 1)]

    def answers(self, ids_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [B, length] each: ids behind the prefixes, their positions, whether the mask has the next token.

        Behind a shorter answer the ids are any, and the mask is False.
        """
        column = torch.arange(self.length, device=ids_N.device)
        position_BA = self.prefix_B[:, None] + column
        token_BA, last = self.start_B[:, None] + position_BA, len(ids_N) - 1
        written_BA = (column < self.length_B[:, None]) & mask_N[(token_BA + 1).clamp(max=last)]
        return ids_N[token_BA.clamp(max=last)], position_BA, written_BA

    def in_one_pass(self, ids_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, of the tokens of prefixes, then of answers: ids, positions, whether the mask has the next token."""
        prefix_P = self.prefix_B[self.first_P]
        of_prompts = ranges(self.start_B[self.first_P], prefix_P)
        of_answers = ranges(self.start_B + self.prefix_B, self.length_B)
        position = torch.cat([places(prefix_P), ranges(self.prefix_B, self.length_B)])
        written = torch.cat([torch.zeros_like(of_prompts, dtype=torch.bool), mask_N[of_answers + 1]])
        return ids_N[torch.cat([of_prompts, of_answers])], position, written

    @functools.cached_property
    def _cells(self) -> Tensor:
        """Return [P * width + B * length] bool: padded prompts, then padded answers, True where they have tokens."""
        prefix_P, device = self.prefix_B[self.first_P], self.prefix_B.device
        of_prompts = torch.arange(self.width, device=device) < prefix_P[:, None]
        of_answers = torch.arange(self.length, device=device) < self.length_B[:, None]
        return torch.cat([of_prompts.flatten(), of_answers.flatten()])

    @functools.cached_property
    def cell_of_token(self) -> Tensor:
        """Return [N]: where each token of :meth:`in_one_pass` is among padded prompts and answers."""
        return self._cells.nonzero()[:, 0]

    @functools.cached_property
    def token_of_cell(self) -> Tensor:
        """Return [P * width + B * length]: the token of :meth:`in_one_pass` in each cell, any in the padding."""
        return self._cells.cumsum(0) - 1

    def keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention without padding reads for the tokens of :meth:`in_one_pass`.

        Shapes:
            lengths      [P + B] queries of each prompt and answer
            key_lengths  [P + B] keys: those of its prompt stand before an answer's own
            key_index    [K]     the token among N whose key it is
        """
        prompts = len(self.first_P)
        lengths = torch.cat([self.prefix_B[self.first_P], self.length_B])
        ahead = F.pad(self.prefix_B, (prompts, 0))
        key_lengths, start = lengths + ahead, lengths.cumsum(0) - lengths
        origin = torch.cat([start[:prompts], start[self.place_B]])  # of the prompt
        number = torch.arange(len(lengths), device=ahead.device).repeat_interleave(key_lengths)
        offset = torch.arange(len(number), device=ahead.device) - (key_lengths.cumsum(0) - key_lengths)[number]
        own = start[number] + offset - ahead[number]
        return lengths, key_lengths, torch.where(offset < ahead[number], origin[number] + offset, own)

    @functools.cached_property
    def attention(self) -> Tensor:
        """Return [B, 1, length, width + length] bool: an answer's token sees its prompt and what stands before it."""
        device = self.prefix_B.device
        prompt_BK = torch.arange(self.width, device=device) < self.prefix_B[:, None]
        answer_QK = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        shape = len(self.prefix_B), 1, self.length
        return torch.cat(
            [prompt_BK[:, None, None].expand(*shape, self.width), answer_QK.expand(*shape, self.length)], -1
        )


def can_share(module: nn.Module) -> bool:
    """Return whether the model's layers see all tokens before their own and take their attention from outside.

    Not in float64, which is for proofs: models that normalise in float32 would differ by its rounding.
    """
    config = module.config.get_text_config()
    windows = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ("sliding_attention" if windows else "full_attention",)
    plain = set(kinds) == {"full_attention"} and module.config._attn_implementation in ("sdpa", "eager", ATTENTION)
    return plain and module.dtype != torch.float64


def can_keep_keys(module: nn.Module) -> bool:
    """Return whether the prompts' keys and values last until a second pass: what is computed again fills no cache."""
    return not (getattr(module, "is_gradient_checkpointing", False) and module.training)


def hidden_before_tokens(
    module: nn.Module,
    ids_N: Tensor,
    mask_N: Tensor,
    shared: SharedPrompts,
    media_B: Sequence[Media | None] = (),
    modality: Modality = TEXT,
) -> Tensor:
    """Return [M, H]: for each token of the mask, sequence by sequence, the hidden state at the position before it."""
    prompt_ids_PT = shared.prompts(ids_N)  # what stands behind a prompt is not seen
    prompts = DynamicCache()
    media = modality.inputs(module, prompt_ids_PT, [media_B[row] for row in shared.first_P.tolist()] if media_B else ())
    modality.run_body(module, prompt_ids_PT, media, past_key_values=prompts, use_cache=True)
    ids_BA, position_BA, written_BA = shared.answers(ids_N, mask_N)
    if media is not None:
        position_BA = position_BA + media.position_offset(shared.prefix_B[shared.first_P] - 1)[shared.place_B, None]
    seen = shared.attention
    if module.config._attn_implementation == "eager":  # it adds its mask to the scores
        zeros = torch.zeros(seen.shape, dtype=module.dtype, device=seen.device)
        seen = zeros.masked_fill_(~seen, torch.finfo(zeros.dtype).min)
    hidden_BAH = module.base_model(
        input_ids=ids_BA,
        position_ids=position_BA,
        attention_mask=seen,
        past_key_values=DynamicCache(
            [(one.keys[shared.place_B], one.values[shared.place_B]) for one in prompts.layers]
        ),
        use_cache=True,
    ).last_hidden_state
    return hidden_BAH[written_BA]
