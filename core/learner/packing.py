"""The inputs of a forward pass: packed sequences, this rank's part of them, and the prompts that answers share.

Sequences lie one after another without padding. Positions restart with each, and attention sees its own sequence alone
(:mod:`core.learner.attention`). A prompt that answers share is read once, and the answers attend to its keys and
values, through which gradients flow back: the result is that of whole sequences up to rounding. A sequence-parallel
group splits the packed tokens evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from core.types import token_places
from core.vision.learner_pictures import PictureInputs


def predicting_tokens(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [N] bool: for each token of the mask the token before it, whose state predicts it.

    The one place where anything is shifted. A prompt has at least one token, so no first token is ever predicted.
    """
    filled_B = lengths_B > 0
    if bool(mask_N[(lengths_B.cumsum(0) - lengths_B)[filled_B]].any()):
        raise ValueError("the first token of a sequence has no state before it: it must belong to the prompt")
    return F.pad(mask_N[1:], (0, 1))


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Return [sum of counts] int64: ``starts[0], starts[0] + 1, ...``, then the numbers from ``starts[1]`` on, ..."""
    offset = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return torch.arange(len(offset), device=starts.device) + offset


def places(lengths_B: Tensor) -> Tensor:
    """Return [N] int64: each token's place in its sequence."""
    return ranges(torch.zeros_like(lengths_B), lengths_B)


def can_share(module: nn.Module) -> bool:
    """Return whether a model's prompts are shared: not in float64, which is for proofs.

    Models that normalise in float32 would differ by its rounding, more than a proof allows.
    """
    return module.dtype != torch.float64


@dataclass(frozen=True)
class Segments:
    """The stretches of tokens that a pass reads, in its order.

    Shapes (S stretches: sequences; or prompts, and the answers behind them):
        start   [S] int64  first token among all tokens of the batch
        length  [S] int64
        prompt  [S] int64  the stretch whose keys stand before its own; its own number where there is none
    """

    start: Tensor
    length: Tensor
    prompt: Tensor

    @property
    def ahead(self) -> Tensor:
        """Return [S]: the keys before a stretch's own."""
        own = torch.arange(len(self.prompt), device=self.prompt.device)
        return torch.where(self.prompt == own, 0, self.length[self.prompt])

    def key_index(self) -> Tensor:
        """Return [K]: for each key that the pass's attention reads, the token of the pass whose key it is."""
        ahead, first = self.ahead, self.length.cumsum(0) - self.length
        counts = self.length + ahead
        number, offset = torch.arange(len(counts), device=counts.device).repeat_interleave(counts), places(counts)
        of_prompt, own = first[self.prompt[number]] + offset, first[number] + offset - ahead[number]
        return torch.where(offset < ahead[number], of_prompt, own)


def whole_sequences(lengths_B: Tensor) -> Segments:
    """Return the sequences as they are."""
    return Segments(lengths_B.cumsum(0) - lengths_B, lengths_B, torch.arange(len(lengths_B), device=lengths_B.device))


def shared_prompts(ids_N: Tensor, mask_N: Tensor, lengths_B: Tensor, group_B: Tensor) -> Segments | None:
    """Return the prompt of each group once, then every answer up to its last token that predicts one of the mask.

    The last token of a prompt is the first of its answers, since its state predicts. A prompt ends before the first
    token of the mask. None where no prompt is shared, a sequence has nothing in the mask, or the sequences of a group
    begin differently.
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
    first_P = torch.full((prompts,), count, device=device).scatter_reduce(0, prompt_B, number_B, "amin")
    twin_B = first_P[prompt_B]  # the sequence whose prompt is read
    if prompts == count or not torch.equal(prefix_B, prefix_B[twin_B]) or int(prefix_B.min()) <= 0:
        return None
    in_prefix_N = place_N < prefix_B[sequence_N]
    twin_N = start_B[twin_B][sequence_N] + place_N
    if not torch.equal(ids_N[in_prefix_N], ids_N[twin_N[in_prefix_N]]):
        return None
    start = torch.cat([start_B[first_P], start_B + prefix_B])
    length = torch.cat([prefix_B[first_P], last_B - prefix_B])
    return Segments(start, length, torch.cat([number_B[:prompts], prompt_B]))


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a forward pass, and at which of its states a policy token is predicted.

    Shapes (n tokens of this rank, of N in the batch):
        input_ids   [1, n] int64
        predicts    [1, n] bool   the next token is one that the policy wrote
        labels      [M]    int64  those tokens, in the order of ``predicts``
        mask_N      [N]    bool   where they stand in the batch
        predicts_N  [N]    bool   ``predicts`` of all ranks that split the sequences
    """

    input_ids: Tensor
    predicts: Tensor
    labels: Tensor
    mask_N: Tensor
    inputs: Mapping[str, Any] = field(default_factory=dict)  # more arguments of the model
    predicts_N: Tensor | None = None
    mesh: DeviceMesh | None = None
    media: PictureInputs | None = None  # of the sequences

    def at_tokens(self, values_M: Tensor) -> Tensor:
        """Return [N]: the values of all ranks at their tokens, 0 elsewhere; differentiable.

        All ranks that split the sequences then compute the same loss. DTensor treats its gradient as one, not as one
        a rank, and gives each rank the part that belongs to its own values: nothing is counted twice.
        """
        if self.mesh is not None:
            from torch.distributed.tensor import DTensor, Shard

            local = scattered(values_M, self.predicts[0])
            values_M = DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False).full_tensor()[self.predicts_N]
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

    With ``group_B`` the prompts of groups are read once, where there are any to share. ``media`` are those of the
    sequences, padded. ``mesh`` are the ranks that split the pass between them.
    """
    shared = None if group_B is None else shared_prompts(ids_N, mask_N, lengths_B, group_B)
    segments = shared or whole_sequences(lengths_B)
    tokens = ranges(segments.start, segments.length)
    ids, predicts = ids_N[tokens], predicting_tokens(mask_N, lengths_B)[tokens]
    labels, position = ids_N[mask_N], ranges(segments.ahead, segments.length)
    lengths, key_lengths = segments.length, segments.length + segments.ahead
    key_index = None if shared is None else segments.key_index()
    ranks = 1 if mesh is None else mesh.size()
    if extra := -len(ids) % ranks:  # a sequence of nothing makes the ranks' parts equal
        nothing = torch.arange(extra, device=ids.device)
        key_index = None if key_index is None else torch.cat([key_index, nothing + len(ids)])
        ids, predicts = F.pad(ids, (0, extra)), F.pad(predicts, (0, extra))
        position = torch.cat([position, nothing])
        lengths, key_lengths = (F.pad(one, (0, 1), value=extra) for one in (lengths, key_lengths))
    starts, key_starts = (F.pad(one.cumsum(0), (1, 0)).to(torch.int32) for one in (lengths, key_lengths))
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
    return ForwardInputs(ids[None, part], predicts[None, part], own_labels, mask_N, inputs, predicts, mesh)


def scattered(values_M: Tensor, mask: Tensor) -> Tensor:
    """Return ``values_M`` where the mask is True, 0 elsewhere, in the mask's shape; differentiable."""
    return torch.zeros(mask.shape, dtype=values_M.dtype, device=values_M.device).masked_scatter(mask, values_M)
