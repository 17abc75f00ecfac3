"""The inputs of a forward pass: padded or packed sequences, this rank's part of packed ones, a shared prompt once.

Packed sequences lie one after another without padding. Positions restart with each, and attention sees its own
sequence alone (:mod:`core.learner.attention`). A sequence-parallel group splits the packed tokens evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from core.errors import InputError
from core.learner.attention import ATTENTION, SharedPrompts, can_share, places
from core.types import pad, token_places
from core.vision.learner_pictures import PictureInputs


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a forward pass, and at which of its states a policy token is predicted.

    Shapes (S is what the model sees: [B, T] padded, [1, N] packed, [1, n] of one of several ranks):
        input_ids   S    int64
        predicts    S    bool   the next token is one that the policy wrote
        labels      [M]  int64  those tokens, in the order of ``predicts``
        mask_N      [N]  bool   where they stand in the batch
        predicts_N  [N]  bool   ``predicts`` of all ranks that split the sequences
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


@dataclass(frozen=True)
class Layout:
    """How the sequences of a micro-batch lie in a pass. A memory setting: it cannot change a result."""

    packed: bool = False
    mesh: DeviceMesh | None = None  # of the ranks that split each pass between them

    @property
    def ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    def prepare(self, module: nn.Module, *, shares: bool = False) -> None:
        """Give the model an attention that keeps packed sequences apart. Raises InputError where it takes none.

        Padded ones get it, too, where they can share a prompt within a pass.
        """
        implementation = module.config._attn_implementation
        if not self.packed:
            if shares and implementation == "sdpa" and can_share(module):
                module.set_attn_implementation(ATTENTION)
            return
        if self.mesh is None and implementation.startswith("flash_attention"):
            return
        module.set_attn_implementation(ATTENTION)
        kind, heads = type(module).__name__, module.config.get_text_config().num_attention_heads
        if module.config._attn_implementation != ATTENTION:
            raise InputError(f"use_remove_padding: {kind} does not take its attention from outside; set it to False")
        if heads % self.ranks:
            raise InputError(
                f"ulysses_sequence_parallel_size={self.ranks}: must divide the {heads} attention heads of {kind}"
            )

    def forward_inputs(
        self,
        ids_N: Tensor,
        mask_N: Tensor,
        lengths_B: Tensor,
        media: PictureInputs | None = None,
        shared: SharedPrompts | None = None,
    ) -> ForwardInputs:
        """Return the inputs of the pass over these sequences, whose policy tokens are in the mask.

        ``media`` are theirs. Padded sequences need no attention mask: attention is causal, so no real token can see the
        padding. Prompts that are ``shared`` stand before the answers, once.
        """
        labels, key_index = ids_N[mask_N], None
        if shared is None:
            position, predicts = places(lengths_B), predicting_tokens(mask_N, lengths_B)
            if not self.packed:
                padded = pad(ids_N, lengths_B), pad(predicts, lengths_B)
                return ForwardInputs(*padded, labels, mask_N, media=media)
            ids, lengths, key_lengths = ids_N, lengths_B, lengths_B
        else:
            ids, position, predicts = shared.in_one_pass(ids_N, mask_N)
            if not self.packed:
                inputs = {"position_ids": position[None], "shared_prompts": shared}
                return ForwardInputs(ids[None], predicts[None], labels, mask_N, inputs)
            lengths, key_lengths, key_index = shared.keys()
        if extra := -len(ids) % self.ranks:  # a sequence of nothing makes the ranks' parts equal
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
        if self.mesh is None:
            inputs |= {"position_ids": position[None]}
            media = media and media.packed(token_places(lengths_B))
            return ForwardInputs(ids[None], predicts[None], labels, mask_N, inputs, media=media)
        size, rank = len(ids) // self.ranks, self.mesh.get_local_rank()
        part = slice(rank * size, (rank + 1) * size)
        inputs |= {"position_ids": position[None, part], "sequence_mesh": self.mesh}
        own_labels = scattered(labels, predicts)[part][predicts[part]]
        of_rank = ids[None, part], predicts[None, part], own_labels
        return ForwardInputs(*of_rank, mask_N, inputs, predicts, self.mesh)


def predicting_tokens(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [N] bool: for each token of the mask the token before it, whose state predicts it.

    The one place where anything is shifted. A prompt has at least one token, so no first token is ever predicted.
    """
    filled_B = lengths_B > 0
    if bool(mask_N[(lengths_B.cumsum(0) - lengths_B)[filled_B]].any()):
        raise ValueError("the first token of a sequence has no state before it: it must belong to the prompt")
    return F.pad(mask_N[1:], (0, 1))


def scattered(values_M: Tensor, mask: Tensor) -> Tensor:
    """Return ``values_M`` where the mask is True, 0 elsewhere, in the mask's shape; differentiable."""
    return torch.zeros(mask.shape, dtype=values_M.dtype, device=values_M.device).masked_scatter(mask, values_M)
