"""Packed sequences: the inputs of a pass over them, and attention within each.

Sequences lie one after another in one row, without padding. A prompt that answers share is read
once, and the answers attend to its keys and values: the result is that of whole sequences up to
rounding. Ranks may split the tokens evenly.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from core.errors import InputError
from core.types import token_places
from core.vision.learner_pictures import PictureInputs

ATTENTION = "packed_rows"  # the name under which transformers finds attend
HEADS, TOKENS = 1, 2  # axes of the queries, keys and values that attend gets
# Of sequences among queries and keys, and the longest of each
Ends = tuple[Tensor, Tensor, int, int]


def predicting_tokens(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [N] bool: for each token of the mask the token before it, whose state predicts it.

    The one place where anything is shifted. A prompt has at least one token, so no first token is
    ever predicted.
    """
    filled_B = lengths_B > 0
    if bool(mask_N[(lengths_B.cumsum(0) - lengths_B)[filled_B]].any()):
        raise ValueError(
            "the first token of a sequence has no state before it: it must belong to the prompt"
        )
    return F.pad(mask_N[1:], (0, 1))


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Return [sum of counts] int64: ``starts[0], starts[0] + 1, ...``, then the numbers from
    ``starts[1]`` on, ..."""
    offset = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return torch.arange(len(offset), device=starts.device) + offset


def places(lengths_B: Tensor) -> Tensor:
    """Return [N] int64: each token's place in its sequence."""
    return ranges(torch.zeros_like(lengths_B), lengths_B)


def can_share(module: nn.Module) -> bool:
    """Return whether a model's prompts are shared: not in float64, whose proofs a norm in float32
    would spoil."""
    return module.dtype != torch.float64


def shared_prompts(
    ids_N: Tensor, mask_N: Tensor, lengths_B: Tensor, group_B: Tensor
) -> tuple[Tensor, ...] | None:
    """Return the stretches of a pass that reads each prompt once, then every answer up to its last
    policy token.

    The last token of a prompt, before the first of the mask, is the first of its answers, since its
    state predicts. None where no prompt is shared, a sequence has nothing in the mask, or sequences
    of a group begin differently.

    Shapes (P prompts, then B answers):
        start, length  [P + B] int64  first token among all tokens of the batch, and how many
        prompt         [P + B] int64  the stretch whose keys stand before its own; of a prompt
        itself
    """
    count, device = len(lengths_B), ids_N.device
    number_B, start_B = torch.arange(count, device=device), lengths_B.cumsum(0) - lengths_B
    sequence_N, place_N = number_B.repeat_interleave(lengths_B), places(lengths_B)
    written_B = sequence_N[mask_N].bincount(minlength=count)
    if not count or not bool(written_B.all()):
        return None
    end_B, place_M = written_B.cumsum(0), place_N[mask_N]
    prefix_B, last_B = place_M[end_B - written_B] - 1, place_M[end_B - 1]
    prompt_B = torch.unique(group_B, return_inverse=True)[1]
    prompts = int(prompt_B.max()) + 1
    first_P = torch.full((prompts,), count, device=device).scatter_reduce(
        0, prompt_B, number_B, "amin"
    )
    twin_B = first_P[prompt_B]  # the sequence whose prompt is read
    if prompts == count or not torch.equal(prefix_B, prefix_B[twin_B]) or int(prefix_B.min()) <= 0:
        return None
    in_prefix_N = place_N < prefix_B[sequence_N]
    twin_N = start_B[twin_B][sequence_N] + place_N
    if not torch.equal(ids_N[in_prefix_N], ids_N[twin_N[in_prefix_N]]):
        return None
    start = torch.cat([start_B[first_P], start_B + prefix_B])
    return (
        start,
        torch.cat([prefix_B[first_P], last_B - prefix_B]),
        torch.cat([number_B[:prompts], prompt_B]),
    )


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a forward pass, and at which of its states a policy token is predicted: n
    tokens of this rank."""

    input_ids: Tensor  # [1, n] int64
    predicts: Tensor  # [1, n] bool: the next token is one that the policy wrote
    labels: Tensor  # [M] int64: those tokens, in the order of ``predicts``
    mask_N: Tensor  # bool: where they stand in the batch
    inputs: Mapping[str, Any] = field(default_factory=dict)  # more arguments of the model
    predicts_N: Tensor | None = None  # bool: ``predicts`` of all ranks that split the sequences
    mesh: DeviceMesh | None = None
    media: PictureInputs | None = None  # of the sequences

    def at_tokens(self, values_M: Tensor) -> Tensor:
        """Return [N]: the values of all ranks at their tokens, 0 elsewhere; differentiable.

        All ranks then compute the same loss, whose gradient DTensor treats as one: nothing is
        counted twice.
        """
        if self.mesh is not None:
            from torch.distributed.tensor import DTensor, Shard

            local = scattered(values_M, self.predicts[0])
            values_M = DTensor.from_local(
                local, self.mesh, [Shard(0)], run_check=False
            ).full_tensor()[self.predicts_N]
        return scattered(values_M, self.mask_N)


def forward_inputs(
    ids_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    group_B: Tensor | None = None,
    media: PictureInputs | None = None,
    mesh: DeviceMesh | None = None,
) -> ForwardInputs:
    """Return the inputs of the pass over these sequences, whose policy tokens are in the mask.

    With ``group_B`` the prompts of groups are read once. ``mesh`` are the ranks that split the pass
    between them.
    """
    shared = None if group_B is None else shared_prompts(ids_N, mask_N, lengths_B, group_B)
    start, lengths, prompt = shared or (lengths_B.cumsum(0) - lengths_B, lengths_B, None)
    tokens = ranges(start, lengths)
    ids, predicts, labels = (
        ids_N[tokens],
        predicting_tokens(mask_N, lengths_B)[tokens],
        ids_N[mask_N],
    )
    # Keys before a stretch's own; the tokens whose keys are read
    ahead, key_index = torch.zeros_like(lengths), None
    if shared is not None:
        ahead = torch.where(
            prompt == torch.arange(len(prompt), device=prompt.device), 0, lengths[prompt]
        )
        first = lengths.cumsum(0) - lengths
        key_index = ranges(
            *(torch.stack(two, 1).flatten() for two in ((first[prompt], first), (ahead, lengths)))
        )
    position, key_lengths = ranges(ahead, lengths), lengths + ahead
    ranks = 1 if mesh is None else mesh.size()
    if extra := -len(ids) % ranks:  # a sequence of nothing makes the ranks' parts equal
        nothing = torch.arange(extra, device=ids.device)
        key_index = None if key_index is None else torch.cat([key_index, nothing + len(ids)])
        ids, predicts = F.pad(ids, (0, extra)), F.pad(predicts, (0, extra))
        position = torch.cat([position, nothing])
        lengths, key_lengths = (F.pad(one, (0, 1), value=extra) for one in (lengths, key_lengths))
    starts, key_starts = (
        F.pad(one.cumsum(0), (1, 0)).to(torch.int32) for one in (lengths, key_lengths)
    )
    inputs = {"cu_seq_lens_q": starts, "cu_seq_lens_k": key_starts, "position_ids": position[None]}
    inputs |= {"max_length_q": int(lengths.max()), "max_length_k": int(key_lengths.max())}
    if key_index is not None:
        inputs["key_index"] = key_index
    if mesh is None:
        media = media and media.packed(token_places(lengths_B))
        return ForwardInputs(ids[None], predicts[None], labels, mask_N, inputs, media=media)
    size, rank = len(ids) // ranks, mesh.get_local_rank()
    part = slice(rank * size, (rank + 1) * size)
    inputs |= {"position_ids": position[None, part], "sequence_mesh": mesh}
    own_labels = scattered(labels, predicts)[part][predicts[part]]
    return ForwardInputs(
        ids[None, part], predicts[None, part], own_labels, mask_N, inputs, predicts, mesh
    )


def scattered(values_M: Tensor, mask: Tensor) -> Tensor:
    """Return ``values_M`` where the mask is True, 0 elsewhere, in the mask's shape;
    differentiable."""
    return torch.zeros(mask.shape, dtype=values_M.dtype, device=values_M.device).masked_scatter(
        mask, values_M
    )


# -- attention -------------------------------------------------------------------------------------


def use_packed_attention(module: nn.Module, ranks: int) -> None:
    """Give the model the attention of this module. Raises InputError where it takes none from
    outside."""
    module.set_attn_implementation(ATTENTION)
    kind, heads = type(module).__name__, module.config.get_text_config().num_attention_heads
    if module.config._attn_implementation != ATTENTION:
        raise InputError(
            f"model.path: {kind} does not take its attention from outside; use another model"
        )
    if heads % ranks:
        raise InputError(
            f"ulysses_sequence_parallel_size={ranks}: must divide the {heads} "
            f"attention heads of {kind}"
        )


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
    """Return causal attention within each sequence; without ``cu_seq_lens_q`` (their ends)
    transformers' own.

    A sequence may have keys in front of those of its own tokens. ``key_index`` are the tokens of
    all keys, where they are not those of the queries. Where ranks split a sequence, tokens are
    exchanged for heads here and only here (Jacobs et al. 2023, arXiv:2309.14509); the exchange and
    its gradient are DTensor's.

    Shapes:
        query       [1, H, n, D]   n tokens of this rank
        key, value  [1, K, n, D]   each of K heads serves H / K of the queries'
        result      [1, n, H, D]
    """
    if cu_seq_lens_q is None:  # a vision tower too: it gets its pictures one by one
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    odd = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if odd:
        raise InputError(
            f"model.path: attention of {type(module).__name__} needs "
            f"{', '.join(odd)}; use another model"
        )
    kind = query.device.type
    # The kernels below are not on autocast's list, as PyTorch's attention is
    if torch.is_autocast_enabled(kind):
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    if sequence_mesh is not None:
        key, value = (_enough_heads(one, sequence_mesh.size()) for one in (key, value))
        query, key, value = (
            _exchange(one, sequence_mesh, TOKENS, HEADS) for one in (query, key, value)
        )
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


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, window: int | None
) -> Tensor:
    """Return [H, N, D] of query [H, N, D], key and value [K, N, D], by PyTorch's variable-length
    flash kernel.

    Where a sequence has more keys than queries its last query sees all of them: so flash-attn
    aligns them since 2.1.
    """
    from torch.nn.attention.varlen import varlen_attn

    parts = (one.transpose(0, 1) for one in (query, key, value))
    options: dict[str, Any] = {
        "scale": scale,
        "window_size": (-1 if window is None else window - 1, 0),
    }
    # Older versions share keys without being told
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return varlen_attn(*parts, *ends, **options).transpose(0, 1)


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, window: int | None
) -> Tensor:
    """Return the same by a kernel that every device has.

    Sequences of similar lengths are padded to one batch of the kernel: a call for each takes a
    quarter longer. What all batches read is gathered at once: each gather's gradient is as large as
    all tokens.
    """
    lengths = tuple(zip(*(one.diff().tolist() for one in ends[:2]), strict=True))
    query_cells, key_cells, masks, cell_of_token = _batches(lengths, window, query.device)
    # A CPU's kernel takes three times as long for the gradient of short sequences in 16 bits as in
    # 32
    dtype = query.dtype if query.is_cuda else torch.promote_types(query.dtype, torch.float32)
    options = {"scale": scale, **({"enable_gqa": True} if len(query) != len(key) else {})}
    parts = []
    for states, cells in ((query, query_cells), (key, key_cells), (value, key_cells)):
        gathered = (
            states.transpose(0, 1)
            .to(dtype)
            .index_select(0, torch.cat([one.flatten() for one in cells]))
        )
        pieces = gathered.split([one.numel() for one in cells])
        parts.append(
            [
                one.unflatten(0, at.shape).transpose(1, 2)
                for one, at in zip(pieces, cells, strict=True)
            ]
        )
    out = []
    with torch.autocast(query.device.type, enabled=False):  # it would choose 16 bits again
        for q, k, v, mask in zip(*parts, masks, strict=True):
            found = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, **options
            )
            out.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).index_select(0, cell_of_token).transpose(0, 1).to(query.dtype)


@functools.lru_cache(maxsize=4)  # each layer of a pass asks for the same ones
def _batches(
    lengths: tuple[tuple[int, int], ...], window: int | None, device: torch.device
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], Tensor]:
    """Return each batch's queries, keys and mask, and [N] where each query is among the cells of
    all batches.

    Shapes (a batch of R sequences, at most Q queries and K keys each, padded behind their ends with
    any token):
        queries  [R, Q] int64  the token in each cell
        keys     [R, K] int64
        mask     [R, 1, Q, K] bool  the keys that a query sees; None: those up to its own place
    """
    counts_B = torch.tensor(lengths).T  # [2, B] of queries and of keys
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(lengths):
        alike.setdefault(tuple(map(_rounded_up, pair)), []).append(number)
    cell_of_token, cells, batches = torch.empty(int(counts_B[0].sum()), dtype=torch.int64), 0, []
    for rows in map(torch.tensor, alike.values()):
        columns = [torch.arange(int(counts[rows].max())) for counts in counts_B]
        queries, keys = (
            ((counts.cumsum(0) - counts)[rows, None] + column).clamp(max=int(counts.sum()) - 1)
            for counts, column in zip(counts_B, columns, strict=True)
        )
        real = columns[0] < counts_B[0, rows, None]
        cell_of_token[queries[real]] = cells + real.flatten().nonzero()[:, 0]
        cells += real.numel()
        ahead, mask = (counts_B[1] - counts_B[0])[rows, None], None
        if bool(ahead.any()) or (window is not None and window < keys.shape[1]):
            # A query in the padding sees what the last key sees: with no key its gradient would not
            # be a number.
            behind = (ahead + columns[0]).clamp(max=keys.shape[1] - 1)[..., None] - columns[1]
            mask = ((behind >= 0) & (behind < (window or keys.shape[1])))[:, None].to(device)
        batches.append((queries.to(device), keys.to(device), mask))
    queries, keys, masks = map(list, zip(*batches, strict=True))
    return queries, keys, masks, cell_of_token.to(device)


def _rounded_up(length: int) -> int:
    """Return the next number of two binary digits and zeros: at most a half more than the
    length."""
    unit = 1 << max(length.bit_length() - 2, 0)
    return -(-length // unit) * unit


AttentionInterface.register(ATTENTION, attend)
