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

from core.learner.attention import ATTENTION
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
    """Return whether the model's layers see all tokens before their own and take their attention from outside.

    Not in float64, which is for proofs: models that normalise in float32 would differ by its rounding.
    """
    config = module.config.get_text_config()
    windows = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ("sliding_attention" if windows else "full_attention",)
    takes = module.config._attn_implementation == ATTENTION
    return takes and set(kinds) == {"full_attention"} and module.dtype != torch.float64


@dataclass(frozen=True)
class SharedPrompts:
    """The sequences that continue each prompt. The last token of a prompt is the first input of its answers.

    Shapes (B sequences, P prompts):
        first_P   [P] a sequence that begins with the prompt
        place_B   [B] the sequence's prompt
        start_B   [B] the sequence's first token among all tokens
        prefix_B  [B] tokens of the prompt but its last one
        length_B  [B] tokens of the sequence behind its prefix, but the last one
    """

    first_P: Tensor
    place_B: Tensor
    start_B: Tensor
    prefix_B: Tensor
    length_B: Tensor

    @classmethod
    def of(cls, ids_N: Tensor, mask_N: Tensor, lengths_B: Tensor, group_B: Tensor) -> SharedPrompts | None:
        """Return None where no prompt is shared, a sequence has nothing that the policy wrote, or a group's differ.

        A prompt ends before the first token of the mask; all sequences of a group must begin with the same one.
        """
        count, device = len(lengths_B), ids_N.device
        number_B = torch.arange(count, device=device)
        sequence_N = number_B.repeat_interleave(lengths_B)
        written_B = sequence_N[mask_N].bincount(minlength=count)
        if not count or not bool(written_B.all()):
            return None
        _, place_B = torch.unique(group_B, return_inverse=True)
        prompts = int(place_B.max()) + 1
        first_P = torch.full((prompts,), count, device=device).scatter_reduce(0, place_B, number_B, "amin")
        place_N, start_B = places(lengths_B), lengths_B.cumsum(0) - lengths_B
        written_M, end_B = place_N[mask_N], written_B.cumsum(0)
        prefix_B, last_B = written_M[end_B - written_B] - 1, written_M[end_B - 1]
        first_B = first_P[place_B]  # the sequence whose prompt is read
        if prompts == count or not torch.equal(prefix_B, prefix_B[first_B]) or int(prefix_B.min()) <= 0:
            return None
        in_prefix_N = place_N < prefix_B[sequence_N]
        twin_N = (start_B[first_B][sequence_N] + place_N)[in_prefix_N]
        if not torch.equal(ids_N[in_prefix_N], ids_N[twin_N]):
            return None
        return cls(first_P, place_B, start_B, prefix_B, last_B - prefix_B)

    def in_one_pass(self, ids_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, of the tokens of prefixes, then of answers: ids, positions, whether the mask has the next token."""
        prefix_P = self.prefix_B[self.first_P]
        of_prompts = ranges(self.start_B[self.first_P], prefix_P)
        of_answers = ranges(self.start_B + self.prefix_B, self.length_B)
        position = torch.cat([places(prefix_P), ranges(self.prefix_B, self.length_B)])
        written = torch.cat([torch.zeros_like(of_prompts, dtype=torch.bool), mask_N[of_answers + 1]])
        return ids_N[torch.cat([of_prompts, of_answers])], position, written

    def keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention reads for the tokens of :meth:`in_one_pass`.

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
        offset = places(key_lengths)
        own = start[number] + offset - ahead[number]
        return lengths, key_lengths, torch.where(offset < ahead[number], origin[number] + offset, own)


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
    media: PictureInputs | None = None,
    shared: SharedPrompts | None = None,
    mesh: DeviceMesh | None = None,
) -> ForwardInputs:
    """Return the inputs of the pass over these sequences, whose policy tokens are in the mask.

    ``media`` are those of the sequences, padded. Prompts that are ``shared`` stand before the answers, once. ``mesh``
    are the ranks that split the pass between them.
    """
    labels, key_index, ranks = ids_N[mask_N], None, 1 if mesh is None else mesh.size()
    if shared is None:
        ids, position, predicts = ids_N, places(lengths_B), predicting_tokens(mask_N, lengths_B)
        lengths, key_lengths = lengths_B, lengths_B
    else:
        ids, position, predicts = shared.in_one_pass(ids_N, mask_N)
        lengths, key_lengths, key_index = shared.keys()
    if extra := -len(ids) % ranks:  # a sequence of nothing makes the ranks' parts equal
        nothing = torch.arange(extra, device=ids.device)
        key_index = None if key_index is None else torch.cat([key_index, nothing + len(ids)])
        ids, predicts = F.pad(ids, (0, extra)), F.pad(predicts, (0, extra))
        position = torch.cat([position, nothing])
        lengths, key_lengths = (F.pad(one, (0, 1), value=extra) for one in (lengths, key_lengths))
    starts, key_starts = (F.pad(one.cumsum(0), (1, 0)).to(torch.int32) for one in (lengths, key_lengths))
    inputs = {"cu_seq_lens_q": starts, "cu_seq_lens_k": key_starts}
    inputs |= {"max_length_q": int(lengths.max()), "max_length_k": int(key_lengths.max())}
    if key_index is not None:
        inputs["key_index"] = key_index
    if mesh is None:
        inputs["position_ids"] = position[None]
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
