"""Checks of a model: the learner's head and packed attention compute what the model does, and so does the engine.

A model that fails is refused with an InputError before anything trains on wrong numbers. How far two passes may differ
is measured: a pass is repeated with embeddings that are rounded otherwise, because what rounding costs depends on the
precision of the products, which under autocast is no tensor's, and on the model's depth. After every sync of weights
engine and learner give a fixed text the same log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from core.errors import InputError
from core.learner.packing import ForwardInputs, forward_inputs, places, predicting_tokens
from core.types import pad

if TYPE_CHECKING:
    from core.learner.passes import LearnerModel, Policy

# In shares of hidden states. In float32 readings of one text differ by 1e-6, where a GPU multiplies in TF32 by 1e-4.
# The factor is for small samples: on SmolLM2-135M in bf16 sharing differs by 0.3 of what rounding costs, and one
# position too many, or a prompt's token that is not seen, by 10 to 15 times as much.
LEAST_DIFFERENCE, ROUNDINGS = 1e-3, 3
OUTLIERS = 0.1  # share of the tokens of the text that engine and learner compare


@torch.no_grad()
def check_head(policy: Policy) -> None:
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


@torch.no_grad()
def check_packing(model: LearnerModel) -> None:
    """Check that two answers to one prompt are read packed, and behind their shared prompt, as each alone.

    Raises InputError. Differences are norms of hidden states in shares of those states' norm: of all tokens together,
    because the state of a single one may be 0.
    """
    lengths = torch.tensor([6, 5], device=model.device)
    place = places(lengths)
    ids = torch.where(place < 4, place, torch.arange(11, device=place.device))  # of each other's only the prompts
    ids, wrote = ids % model.module.config.get_text_config().vocab_size, place > 3

    def states(module: nn.Module, inputs: ForwardInputs) -> Tensor:
        out = module.base_model(input_ids=inputs.input_ids, use_cache=False, **inputs.inputs)
        return out.last_hidden_state[inputs.predicts].float()

    def read(inputs: ForwardInputs) -> Tensor:
        with model.precision():
            return model.ranks.with_gathered_params(model.module, states, inputs)

    predicts = pad(predicting_tokens(wrote, lengths), lengths)
    alone = ForwardInputs(pad(ids, lengths), predicts, ids[wrote], wrote)  # causal: padding behind the ends is not seen
    plain = read(alone)
    with rounded_otherwise(model.module):
        rounding = float((read(alone) - plain).norm() / plain.norm())
    bound = max(LEAST_DIFFERENCE, ROUNDINGS * rounding)
    for group in (None, lengths * 0) if model.shares else (None,):
        apart = float((read(forward_inputs(ids, wrote, lengths, group_B=group)) - plain).norm() / plain.norm())
        if not apart <= bound:  # NaN too
            what = "packed sequences" if group is None else "answers behind a shared prompt"
            raise InputError(
                f"model.path: {type(model.module).__name__} reads {what} otherwise than each alone "
                f"(by {apart:.2g} of a state, and rounding explains {bound:.2g}); use another model"
            )


@contextmanager
def rounded_otherwise(module: nn.Module) -> Iterator[None]:
    """Move the embeddings of passes by up to half a unit in the last place of the precision that computes."""

    def moved(_: nn.Module, __: tuple, states: Tensor) -> Tensor:
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
def logprob_noise(policy: Policy, token_ids: Sequence[int]) -> float:
    """Return how far, in nats a token, two passes lie apart that differ by rounding alone, on average over a text."""
    text = token_ids if len(token_ids) > 1 else range(4)  # prompts with media alone leave none
    ids = torch.tensor([*text], device=policy.device)
    inputs = forward_inputs(ids, torch.arange(len(ids), device=ids.device) > 0, ids.new_tensor([len(ids)]))
    plain = policy.forward(inputs)[0]
    with rounded_otherwise(policy.module):
        return float((policy.forward(inputs)[0] - plain).abs().mean())


# -- after a sync of weights -------------------------------------------------------------------------


class WeightSyncError(RuntimeError):
    """The engine does not compute with the learner's weights."""


def probe_ids(vocab_size: int, length: int = 24) -> tuple[int, ...]:
    """Return a fixed text of random ids: it touches the embedding, every layer and the head."""
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab_size, length))


@torch.no_grad()
def probe_log_probs(policy: Policy) -> np.ndarray:
    """Return the learner's log-probs of the fixed text, [n - 1] float32, as :meth:`RolloutEngine.probe` gives them."""
    ids = probe_ids(policy.module.config.get_text_config().vocab_size)
    with policy.precision():
        logits = policy.module(input_ids=torch.tensor([ids], device=policy.device), use_cache=False).logits
    log_probs = logits[0, :-1].float().log_softmax(-1).cpu()
    return log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def compare_weights(sent: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]]) -> None:
    """Compare checksums of an engine's weights, by name, with those that the learner sent. Raises WeightSyncError."""
    if wrong := [name for name, value in held.items() if sent.get(name) != value]:
        raise WeightSyncError(
            f"after the weight sync {len(wrong)} of {len(held)} weights of the engine are not those that the learner "
            f"sent ({', '.join(wrong[:3])}): some of its weights are stale or were rounded"
        )


def compare_probe(learner: np.ndarray, engine: np.ndarray, *, bf16: bool) -> float:
    """Return the largest difference of the two, [N] each; a wrong weight moves nearly all tokens.

    Rounding grows with the number that is rounded: the tokens are random ones, whose log-probs may be -50. In bf16 on a
    GPU one of them is beyond the bound in undisturbed runs of a real model, by 0.5 to 2.5.

    Raises:
        WeightSyncError: more than one token in ten is beyond the bound of the precision.
    """
    difference = np.abs(learner - engine)
    bound = 0.25 + np.abs(learner) / 64 if bf16 else 1e-3 + np.abs(learner) * 1e-5
    beyond = ~(difference <= bound)  # NaN too
    if not beyond.any():
        return float(difference.max())
    worst = int(np.argmax(np.nan_to_num(difference / bound, nan=np.inf)))
    if beyond.mean() > OUTLIERS or not np.isfinite(difference).all():
        raise WeightSyncError(
            f"after the weight sync the engine's log-prob of {beyond.sum()} of {len(beyond)} tokens is not the "
            f"learner's, at worst {engine[worst]:.4g} instead of {learner[worst]:.4g} (bound of the difference "
            f"{bound[worst]:.3g}): some of its weights are stale"
        )
    return float(difference.max())
