"""Checks of a model when it is loaded: the learner's own head and packed attention compute what the model computes.

A model that fails is refused with an InputError before anything trains on wrong numbers; one that cannot share prompts
within a pass repeats them instead. How far two passes may differ is measured: a pass is repeated with embeddings that
are rounded otherwise, because what rounding costs depends on the precision of the products, which under autocast is no
tensor's, and on the model's depth. What a sync of weights is checked by stands in ``core.learner.weight_probe``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from core.errors import InputError
from core.learner.attention import ATTENTION, SharedPrompts, places
from core.learner.packing import ForwardInputs, Layout

log = logging.getLogger(__name__)

# In shares of hidden states. In float32 readings of one text differ by 1e-6, where a GPU multiplies in TF32 by 1e-4.
# The factor is for small samples: on SmolLM2-135M in bf16 sharing differs by 0.3 of what rounding costs, and one
# position too many, or a prompt's token that is not seen, by 10 to 15 times as much.
LEAST_DIFFERENCE, ROUNDINGS = 1e-3, 3


class CheckedPolicy(Protocol):
    """What the checks need of a :class:`core.learner.learner.Policy`."""

    module: nn.Module
    layout: Layout
    ranks: Any
    modality: Any
    device: torch.device

    def precision(self) -> Any: ...
    def forward(self, inputs: ForwardInputs) -> tuple[Tensor, Any]: ...


@functools.cache
def check_speed(dtype: torch.dtype, device_type: str) -> None:
    """Warn, once a process, where a processor has no instructions for ``dtype``.

    Measured on two cores with AVX2: products in bfloat16 take a hundred times as long as in float32, so that a run of
    minutes becomes one of hours.
    """
    if dtype is torch.bfloat16 and device_type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        log.warning(
            "this processor has no instructions for bfloat16, and multiplies it up to a hundred times slower than "
            "float32; set fsdp_config.dtype of actor, ref and critic, and actor_rollout_ref.rollout.dtype, to float32"
        )


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
        ours, theirs = policy.ranks.with_gathered_params(module, logits), module(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2):
        raise InputError(
            f"{kind} changes its logits after the head (a cap or a scale), which the chunked log-prob does not do; use "
            "a model without final_logit_softcapping / logit_scale"
        )


@contextmanager
def rounded_otherwise(module: nn.Module) -> Iterator[None]:
    """Move the embeddings of passes by up to half a unit in the last place of the precision that computes."""

    def moved(_: nn.Module, __: Any, states: Tensor) -> Tensor:
        kind, dtype = states.device.type, states.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        shift = torch.rand(states.shape, generator=torch.Generator().manual_seed(0)) - 0.5
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        return (wide * (1 + torch.finfo(dtype).eps * shift.to(wide))).to(states.dtype)

    hook = module.get_input_embeddings().register_forward_hook(moved)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def logprob_noise(policy: CheckedPolicy, token_ids: Sequence[int]) -> float:
    """Return how far, in nats a token, two passes lie apart that differ by rounding alone, on average over a text."""
    text = token_ids if len(token_ids) > 1 else range(4)  # prompts with media alone leave none
    ids = torch.tensor([*text], device=policy.device)
    lengths, place = ids.new_tensor([len(ids)]), torch.arange(len(ids), device=ids.device)
    inputs = Layout(policy.layout.packed).forward_inputs(ids, place > 0, lengths)
    plain = policy.forward(inputs)[0]
    with rounded_otherwise(policy.module):
        return float((policy.forward(inputs)[0] - plain).abs().mean())


def _difference(policy: CheckedPolicy, one: ForwardInputs, other: ForwardInputs) -> tuple[float, float]:
    """Return how far two passes over the same tokens lie apart, and the most that rounding explains.

    Both are norms of differences between hidden states in shares of those states' norm: of all tokens together, because
    the state of a padding token may be 0.
    """

    def states(module: nn.Module, inputs: ForwardInputs) -> Tensor:
        out = module.base_model(input_ids=inputs.input_ids, use_cache=False, **inputs.inputs)
        return out.last_hidden_state[inputs.predicts].float()

    def forward(inputs: ForwardInputs, *, moved: bool = False) -> Tensor:
        with policy.precision(), rounded_otherwise(policy.module) if moved else nullcontext():
            return policy.ranks.with_gathered_params(policy.module, states, inputs)

    plain = forward(one)

    def apart(hidden: Tensor) -> float:
        return float((hidden - plain).norm() / plain.norm())

    return apart(forward(other)), max(LEAST_DIFFERENCE, ROUNDINGS * apart(forward(one, moved=True)))


@torch.no_grad()
def check_packing(policy: CheckedPolicy) -> None:
    """Check that a packed sequence does not see its neighbours and is read as it is alone."""
    if not policy.layout.packed:
        return
    ids = torch.arange(10, device=policy.device) % policy.module.config.get_text_config().vocab_size
    lengths = ids.new_tensor([6, 4])
    ways = (Layout(packed).forward_inputs(ids, places(lengths) > 0, lengths) for packed in (False, True))
    apart, bound = _difference(policy, *ways)
    if not apart <= bound:  # NaN too
        raise InputError(
            f"use_remove_padding: {type(policy.module).__name__} reads packed sequences otherwise than padded ones "
            f"(by {apart:.2g} of a state, and rounding explains {bound:.2g}); set it to False"
        )


@torch.no_grad()
def shares_alike(policy: CheckedPolicy) -> bool:
    """Return whether answers behind a prompt that they share within a pass are read as whole sequences are.

    False of models that read media, whose positions are not places. A difference of numbers is logged.
    """
    module = policy.module
    if module.config._attn_implementation != ATTENTION or policy.modality.reads_media:
        return False
    lengths = torch.tensor([6, 5], device=policy.device)
    place = places(lengths)
    ids = torch.where(place < 4, place, torch.arange(11, device=place.device))  # of each other's only the prompts
    ids, wrote = ids % module.config.get_text_config().vocab_size, place > 3
    prompts = SharedPrompts.of(ids, wrote, lengths, lengths * 0, packed=policy.layout.packed)
    layout = Layout(policy.layout.packed)
    ways = (layout.forward_inputs(ids, wrote, lengths, shared=shared) for shared in (None, prompts))
    apart, bound = _difference(policy, *ways)
    alike = apart <= bound
    if not alike:
        log.warning(
            "%s reads answers behind a shared prompt otherwise than alone (by %.2g of a state, and rounding explains "
            "%.2g): prompts are repeated",
            type(module).__name__,
            apart,
            bound,
        )
    return alike
