"""Checks of a model when it is loaded: the learner's own head and packed attention compute what the model computes.

A model that fails is refused with an InputError before anything trains on wrong numbers; one that cannot share prompts
within a pass repeats them instead. What a sync of weights is checked by stands in ``core.learner.weight_probe``.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from core.errors import InputError
from core.learner.packing import ATTENTION, Layout, SharedPrompts

log = logging.getLogger(__name__)


class CheckedPolicy(Protocol):
    """What the checks need of a :class:`core.learner.learner.Policy`."""

    module: nn.Module
    layout: Layout
    ranks: Any
    device: torch.device

    def precision(self) -> Any: ...
    def read(self, piece: Any) -> tuple[Tensor, Any]: ...


@torch.no_grad()
def check_head(policy: CheckedPolicy) -> None:
    """Check that the chunked head computes what the model computes: some models scale or cap their logits."""
    module, kind = policy.module, type(policy.module).__name__
    if not isinstance(module.get_output_embeddings(), nn.Linear):
        raise InputError(f"{kind} has no linear output head")
    ids = torch.arange(4, device=policy.device)[None] % module.config.get_text_config().vocab_size

    def logits(module: nn.Module) -> Tensor:
        hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return module.get_output_embeddings()(hidden)

    with policy.precision():
        ours, theirs = policy.ranks.inside(module, logits), module(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2):
        raise InputError(
            f"{kind} changes its logits after the head (a cap or a scale), which the chunked log-prob does not do; use "
            "a model without final_logit_softcapping / logit_scale"
        )


@torch.no_grad()
def check_packing(policy: CheckedPolicy) -> None:
    """Check that a packed sequence does not see its neighbours and is read as it is alone."""
    if not policy.layout.packed:
        return
    ids = torch.arange(12, device=policy.device).view(2, 6) % policy.module.config.get_text_config().vocab_size
    real = torch.arange(6, device=policy.device) < torch.tensor([[6], [4]], device=policy.device)
    wrote = real & (torch.arange(6, device=policy.device) > 0)
    packed, padded = (policy.read(Layout(packed).read(ids, real, wrote))[0] for packed in (True, False))
    if not torch.allclose(packed, padded, atol=5e-2, rtol=5e-2):
        raise InputError(
            f"use_remove_padding: {type(policy.module).__name__} reads packed sequences otherwise than padded ones "
            f"(by up to {float((packed - padded).abs().max()):.2g}); set it to False"
        )


@torch.no_grad()
def shares_alike(passes: CheckedPolicy) -> bool:
    """Return whether answers behind a prompt that they share within a pass are read as whole sequences are.

    False of models with a vision tower, whose positions are not places. A difference of numbers is logged.
    """
    module = passes.module
    if module.config._attn_implementation != ATTENTION or hasattr(module.base_model, "visual"):
        return False
    place = torch.arange(12, device=passes.device).view(2, 6)
    ids = torch.where(place % 6 < 4, place % 6, place) % module.config.get_text_config().vocab_size
    real = place % 6 < torch.tensor([[6], [5]], device=passes.device)
    wrote = real & (place % 6 > 3)
    prompts = SharedPrompts.of(ids, wrote, place[:, 0] * 0, packed=passes.layout.packed)

    def states(module: nn.Module, shared: SharedPrompts | None) -> Tensor:
        reading = Layout(passes.layout.packed).read(ids, real, wrote, shared=shared)
        return module.base_model(input_ids=reading.input_ids, use_cache=False, **reading.inputs).last_hidden_state[
            reading.asked
        ]

    with passes.precision():
        plain, shared = (passes.ranks.inside(module, states, one) for one in (None, prompts))
    apart = float(((plain - shared).float().norm(dim=-1) / plain.float().norm(dim=-1)).max())
    alike = apart < (1e-3 if plain.dtype.itemsize > 2 else 5e-2)
    if not alike:
        log.warning(
            "%s reads answers behind a shared prompt otherwise than alone (by %.2g of a state): prompts are repeated",
            type(module).__name__,
            apart,
        )
    return alike
