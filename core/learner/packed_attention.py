"""Packed sequences: the inputs of a pass over them, and attention within each.

Sequences lie one after another in one row, without padding. A prompt that several answers share is
read once, and the answers attend to its keys and values: up to rounding the result is that of whole
sequences. Ranks may split the tokens of a pass evenly.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from core.errors import InputError
from core.learner.log_probs import KeptIds
from core.types import token_places

if TYPE_CHECKING:
    from core.vision.learner_pictures import PictureInputs

ATTENTION = "packed_rows"  # the name under which transformers finds attend
# Axes of the queries, keys and values that attend gets
HEADS = 1
TOKENS = 2
# Ends of the sequences among queries and among keys, and the longest of each
Ends = tuple[Tensor, Tensor, int, int]


def predicting_tokens(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [N] bool: for each token of the mask the token before it, whose state predicts it.

    The one place where anything is shifted. A prompt has at least one token, so no first token is
    ever predicted.
    """
    starts_B = lengths_B.cumsum(0) - lengths_B
    first_tokens = starts_B[lengths_B > 0]
    if bool(mask_N[first_tokens].any()):
        raise ValueError(
            "the first token of a sequence has no state before it: it must belong to the prompt"
        )
    return F.pad(mask_N[1:], (0, 1))


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the numbers ``starts[i], ..., starts[i] + counts[i] - 1`` of every i, int64."""
    offset = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return torch.arange(len(offset), device=starts.device) + offset


def places(lengths_B: Tensor) -> Tensor:
    """Return [N] int64: each token's place in its sequence."""
    return ranges(torch.zeros_like(lengths_B), lengths_B)


def scattered(values_M: Tensor, mask: Tensor) -> Tensor:
    """Return ``values_M`` where the mask is True and 0 elsewhere, in its shape; differentiable."""
    zeros = torch.zeros(mask.shape, dtype=values_M.dtype, device=values_M.device)
    return zeros.masked_scatter(mask, values_M)


# -- shared prompts --------------------------------------------------------------------------------


class Stretches(NamedTuple):
    """The S stretches of tokens that a pass reads: first P prompts, then B answers."""

    start: Tensor  # [S] int64: the first token, among all tokens of the batch
    length: Tensor  # [S] int64
    prompt: Tensor  # [S] int64: the stretch whose keys stand before its own; a prompt's is itself


def can_share(module: nn.Module) -> bool:
    """Return whether a model's prompts are shared.

    Not in float64, which is there for exact comparisons: some norms compute in float32.
    """
    return module.dtype != torch.float64


def shared_prompts(
    ids_N: Tensor, mask_N: Tensor, lengths_B: Tensor, group_B: Tensor
) -> Stretches | None:
    """Return the stretches of a pass that reads each group's prompt once, and then every answer.

    An answer begins with the last token of its prompt, whose state predicts the first token of the
    mask, and ends with its last token of the mask. Returns None if no prompt is shared, if a
    sequence has nothing in the mask, or if the sequences of a group begin differently.
    """
    device = ids_N.device
    count = len(lengths_B)
    number_B = torch.arange(count, device=device)
    start_B = lengths_B.cumsum(0) - lengths_B
    sequence_N = number_B.repeat_interleave(lengths_B)
    place_N = places(lengths_B)
    written_B = sequence_N[mask_N].bincount(minlength=count)
    if not count or not bool(written_B.all()):
        return None
    # Places of the first and the last token of the mask in each sequence
    place_M = place_N[mask_N]
    end_B = written_B.cumsum(0)
    first_written_B = place_M[end_B - written_B]
    last_written_B = place_M[end_B - 1]
    prefix_B = first_written_B - 1  # tokens of the prompt without its last one
    _, prompt_B = torch.unique(group_B, return_inverse=True)
    prompts = int(prompt_B.max()) + 1
    # The first sequence of each group, whose prompt is read
    first_P = torch.full((prompts,), count, device=device)
    first_P = first_P.scatter_reduce(0, prompt_B, number_B, "amin")
    twin_B = first_P[prompt_B]
    if prompts == count or not torch.equal(prefix_B, prefix_B[twin_B]) or int(prefix_B.min()) <= 0:
        return None
    in_prefix_N = place_N < prefix_B[sequence_N]
    twin_token_N = start_B[twin_B][sequence_N] + place_N
    if not torch.equal(ids_N[in_prefix_N], ids_N[twin_token_N[in_prefix_N]]):
        return None
    return Stretches(
        start=torch.cat([start_B[first_P], start_B + prefix_B]),
        length=torch.cat([prefix_B[first_P], last_written_B - prefix_B]),
        prompt=torch.cat([number_B[:prompts], prompt_B]),
    )


# -- the inputs of a pass --------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a pass over n tokens of this rank, and which of their states are read."""

    input_ids: Tensor  # [1, n] int64
    is_predicting: Tensor  # [1, n] bool: the next token is one that the policy wrote
    labels: Tensor  # [M] int64: those next tokens
    mask_N: Tensor  # bool: where they stand in the batch
    model_arguments: Mapping[str, Any] = field(default_factory=dict)  # besides input_ids
    is_predicting_N: Tensor | None = (
        None  # bool: ``is_predicting`` of all ranks that split the pass
    )
    mesh: DeviceMesh | None = None  # those ranks
    media: PictureInputs | None = None
    kept: KeptIds | None = None  # of the labels, if truncated samples are replayed

    def at_tokens(self, values_M: Tensor) -> Tensor:
        """Return [N]: the values of all ranks at their tokens, 0 elsewhere; differentiable.

        All ranks then compute the same loss, whose gradient DTensor treats as one: nothing is
        counted twice.
        """
        if self.mesh is not None:
            from torch.distributed.tensor import DTensor, Shard

            of_rank = scattered(values_M, self.is_predicting[0])
            shared = DTensor.from_local(of_rank, self.mesh, [Shard(0)], run_check=False)
            values_M = shared.full_tensor()[self.is_predicting_N]
        return scattered(values_M, self.mask_N)


def forward_inputs(
    ids_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    group_B: Tensor | None = None,
    kept: KeptIds | None = None,
    media: PictureInputs | None = None,
    mesh: DeviceMesh | None = None,
) -> ForwardInputs:
    """Return the inputs of a pass over these sequences; the mask holds the policy's tokens.

    With ``group_B`` each group's prompt is read once. ``kept`` are the ids of the mask's tokens.
    ``mesh`` are the ranks that split the pass.
    """
    start_S, length_S, keys_before_S, key_index = _layout(ids_N, mask_N, lengths_B, group_B)
    tokens = ranges(start_S, length_S)
    ids = ids_N[tokens]
    labels = ids_N[mask_N]
    is_predicting = predicting_tokens(mask_N, lengths_B)[tokens]
    position = ranges(keys_before_S, length_S)
    key_length_S = length_S + keys_before_S
    missing = 0 if mesh is None else -len(ids) % mesh.size()
    if missing:
        # A sequence of nothing makes the parts of the ranks equal
        nothing = torch.arange(missing, device=ids.device)
        if key_index is not None:
            key_index = torch.cat([key_index, nothing + len(ids)])
        ids = F.pad(ids, (0, missing))
        is_predicting = F.pad(is_predicting, (0, missing))
        position = torch.cat([position, nothing])
        length_S = F.pad(length_S, (0, 1), value=missing)
        key_length_S = F.pad(key_length_S, (0, 1), value=missing)
    model_arguments = {
        "position_ids": position[None],
        "cu_seq_lens_q": _cumulative(length_S),
        "cu_seq_lens_k": _cumulative(key_length_S),
        "max_length_q": int(length_S.max()),
        "max_length_k": int(key_length_S.max()),
    }
    if key_index is not None:
        model_arguments["key_index"] = key_index
    media = media and media.packed(token_places(lengths_B))
    whole = ForwardInputs(
        ids[None], is_predicting[None], labels, mask_N, model_arguments, media=media, kept=kept
    )
    return whole if mesh is None else _part_of_rank(whole, mesh)


class Layout(NamedTuple):
    """The S sequences of tokens that attention reads in a pass."""

    start: Tensor  # [S] int64: the first token, among all tokens of the batch
    length: Tensor  # [S] int64
    keys_before: Tensor  # [S] int64: tokens of a shared prompt whose keys stand before its own
    key_index: Tensor | None  # the tokens whose keys are read, if they are not those of the queries


def _layout(ids_N: Tensor, mask_N: Tensor, lengths_B: Tensor, group_B: Tensor | None) -> Layout:
    """Return the layout of whole sequences, or of prompts that answers share."""
    shared = None if group_B is None else shared_prompts(ids_N, mask_N, lengths_B, group_B)
    if shared is None:
        starts_B = lengths_B.cumsum(0) - lengths_B
        return Layout(starts_B, lengths_B, torch.zeros_like(lengths_B), None)
    start_S, length_S, prompt_S = shared
    is_prompt_S = prompt_S == torch.arange(len(prompt_S), device=prompt_S.device)
    keys_before_S = torch.where(is_prompt_S, 0, length_S[prompt_S])
    # A stretch reads the keys of its prompt and then its own
    first_S = length_S.cumsum(0) - length_S
    key_starts = torch.stack([first_S[prompt_S], first_S], 1).flatten()
    key_counts = torch.stack([keys_before_S, length_S], 1).flatten()
    return Layout(start_S, length_S, keys_before_S, ranges(key_starts, key_counts))


def _part_of_rank(whole: ForwardInputs, mesh: DeviceMesh) -> ForwardInputs:
    """Return this rank's part of the tokens, and of their labels."""
    is_predicting_N = whole.is_predicting[0]
    size = len(is_predicting_N) // mesh.size()
    start = mesh.get_local_rank() * size
    of_rank = slice(start, start + size)
    first_label = int(is_predicting_N[:start].sum())
    labels = slice(first_label, first_label + int(is_predicting_N[of_rank].sum()))
    position = whole.model_arguments["position_ids"][:, of_rank]
    return dataclasses.replace(
        whole,
        input_ids=whole.input_ids[:, of_rank],
        is_predicting=whole.is_predicting[:, of_rank],
        labels=whole.labels[labels],
        model_arguments={**whole.model_arguments, "position_ids": position, "sequence_mesh": mesh},
        is_predicting_N=is_predicting_N,
        mesh=mesh,
        media=None,  # a pass that reads pictures is not split
        kept=whole.kept and whole.kept.of_tokens(labels),
    )


def _cumulative(lengths: Tensor) -> Tensor:
    """Return 0 and the ends of the sequences, int32, as variable-length kernels take them."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


# -- attention -------------------------------------------------------------------------------------


def use_packed_attention(module: nn.Module, ranks: int) -> None:
    """Give the model the attention of this module. Raises InputError if it does not take it."""
    module.set_attn_implementation(ATTENTION)
    kind = type(module).__name__
    if module.config._attn_implementation != ATTENTION:
        raise InputError(
            f"model.path: {kind} does not take its attention from outside; use another model"
        )
    heads = module.config.get_text_config().num_attention_heads
    if heads % ranks:
        raise InputError(
            f"ulysses_sequence_parallel_size={ranks}: must divide the {heads} attention heads of "
            f"{kind}"
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
    """Return causal attention within each sequence; without ``cu_seq_lens_q`` transformers' own.

    A sequence may have keys before those of its own tokens. ``key_index`` are the tokens of all
    keys, if they are not those of the queries. If ranks split a pass, tokens are exchanged for
    heads here and only here (Jacobs et al. 2023, arXiv:2309.14509), by DTensor.

    Shapes:
        query       [1, H, n, D]   n tokens of this rank
        key, value  [1, K, n, D]   each of K heads serves H / K of the queries'
        result      [1, n, H, D]
    """
    if cu_seq_lens_q is None:  # for the vision tower too, which gets its pictures one by one
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    unknown = [n for n in ("softcap", "s_aux", "position_bias") if others.get(n) is not None]
    if unknown:
        raise InputError(
            f"model.path: attention of {type(module).__name__} needs {', '.join(unknown)}; use "
            "another model"
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # The kernels below are not on autocast's list, as PyTorch's attention is
        dtype = torch.get_autocast_dtype(kind)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    if sequence_mesh is not None:
        ranks = sequence_mesh.size()
        query = _exchange(query, sequence_mesh, TOKENS, HEADS)
        key = _exchange(_enough_heads(key, ranks), sequence_mesh, TOKENS, HEADS)
        value = _exchange(_enough_heads(value, ranks), sequence_mesh, TOKENS, HEADS)
    if key_index is not None:
        key = key.index_select(TOKENS, key_index)
        value = value.index_select(TOKENS, key_index)
    has_kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    by_sequences = _varlen if has_kernel else _by_length
    ends = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    output = by_sequences(query[0], key[0], value[0], ends, scaling, sliding_window)[None]
    if sequence_mesh is not None:
        output = _exchange(output, sequence_mesh, HEADS, TOKENS)
    return output.transpose(HEADS, TOKENS).contiguous(), None


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
    """Return [H, N, D] of query [H, N, D], key and value [K, N, D] by PyTorch's flash kernel.

    If a sequence has more keys than queries, its last query sees all of them: flash-attn aligns
    them so since 2.1.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {
        "scale": scale,
        "window_size": (-1 if window is None else window - 1, 0),
    }
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True  # older versions share keys without it
    output = varlen_attn(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), *ends, **options
    )
    return output.transpose(0, 1)


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, window: int | None
) -> Tensor:
    """Return the same by a kernel that every device has.

    Sequences of similar lengths are padded to one batch of the kernel: a call for each sequence
    takes a quarter longer. The tokens of all batches are gathered at once, since the gradient of
    each gather is as large as all tokens.
    """
    query_ends, key_ends, _, _ = ends
    lengths = zip(query_ends.diff().tolist(), key_ends.diff().tolist(), strict=True)
    query_cells, key_cells, masks, cell_of_token = _batches(tuple(lengths), window, query.device)
    # A CPU's gradient of short sequences takes three times as long in 16 bits as in 32
    dtype = query.dtype if query.is_cuda else torch.promote_types(query.dtype, torch.float32)
    queries = _gathered(query, query_cells, dtype)
    keys = _gathered(key, key_cells, dtype)
    values = _gathered(value, key_cells, dtype)
    options = {"enable_gqa": True} if len(query) != len(key) else {}
    outputs = []
    with torch.autocast(query.device.type, enabled=False):  # it would choose 16 bits again
        for q, k, v, mask in zip(queries, keys, values, masks, strict=True):
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, **options
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, cell_of_token).transpose(0, 1).to(query.dtype)


def _gathered(states: Tensor, cells: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the states of each batch's cells, [R, heads, cells of a sequence, D]."""
    index = torch.cat([each.flatten() for each in cells])
    gathered = states.transpose(0, 1).to(dtype).index_select(0, index)
    batches = gathered.split([each.numel() for each in cells])
    return [
        batch.unflatten(0, each.shape).transpose(1, 2)
        for batch, each in zip(batches, cells, strict=True)
    ]


@functools.lru_cache(maxsize=4)  # all layers of a pass need the same ones
def _batches(
    lengths: tuple[tuple[int, int], ...], window: int | None, device: torch.device
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], Tensor]:
    """Return the queries, keys and mask of each batch, and [N] the cell of each query's result.

    Shapes, of a batch of R sequences with at most Q queries and K keys, padded at their ends:
        queries  [R, Q] int64  the token in each cell; any token in the padding
        keys     [R, K] int64
        mask     [R, 1, Q, K] bool  the keys that a query sees; None: those up to its own place
    """
    query_count_B, key_count_B = torch.tensor(lengths).T
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (queries, keys) in enumerate(lengths):
        alike.setdefault((_rounded_up(queries), _rounded_up(keys)), []).append(number)
    query_cells: list[Tensor] = []
    key_cells: list[Tensor] = []
    masks: list[Tensor | None] = []
    cell_of_token = torch.empty(int(query_count_B.sum()), dtype=torch.int64)
    cells = 0
    for numbers in alike.values():
        rows = torch.tensor(numbers)
        queries, query_column = _cells(query_count_B, rows)
        keys, key_column = _cells(key_count_B, rows)
        is_query = query_column < query_count_B[rows, None]
        cell_of_token[queries[is_query]] = cells + is_query.flatten().nonzero()[:, 0]
        cells += is_query.numel()
        keys_before = (key_count_B - query_count_B)[rows, None]
        longest = keys.shape[1]
        mask = None
        if bool(keys_before.any()) or (window is not None and window < longest):
            # A query in the padding sees what the last one sees: without keys its gradient is NaN
            place_of_query = (keys_before + query_column).clamp(max=longest - 1)
            distance = place_of_query[..., None] - key_column
            mask = (distance >= 0) & (distance < (window or longest))
            mask = mask[:, None].to(device)
        query_cells.append(queries.to(device))
        key_cells.append(keys.to(device))
        masks.append(mask)
    return query_cells, key_cells, masks, cell_of_token.to(device)


def _cells(count_B: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token in each cell of a batch of these sequences, and the columns of the cells."""
    start_B = count_B.cumsum(0) - count_B
    column = torch.arange(int(count_B[rows].max()))
    tokens = (start_B[rows, None] + column).clamp(max=int(count_B.sum()) - 1)
    return tokens, column


def _rounded_up(length: int) -> int:
    """Return the next number of two binary digits and zeros: at most a half more."""
    unit = 1 << max(length.bit_length() - 2, 0)
    return -(-length // unit) * unit


AttentionInterface.register(ATTENTION, attend)
