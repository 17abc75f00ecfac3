"""Which function each file of golden vectors is about, and how its inputs map onto ours.

An adapter yields :class:`Comparison` objects for a case at a precision ("f64" or "f32").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from core.algorithm import advantages, kl, losses, sequences
from core.config import registry
from core.learner import step_settings
from core.learner.log_probs import token_log_probs_and_entropy
from tests import golden_dapo, golden_mismatch
from tests.golden_io import Case, Comparison
from tests.padded import (
    PaddedAdvantageInputs,
    batch_of_padded,
    on_padded,
    padded_loss,
    padded_loss_weights,
)

Adapter = Callable[[Case, str], Iterator[Comparison]]

EMPTY_STEP = "a step without a token has loss 0 and gradient 0; published: NaN, from 0 / 0"
NAN_OUTSIDE = (
    "what lies outside the mask is selected away; published: NaN * 0 = NaN in the seq-mean modes"
)
# Whitened or divided by a spread that is rounding error in float32.
ILL_CONDITIONED = ("near", "gae bs=1 T=2 ", "rewards=allone groups=singletons")
RANKS = (
    "the weights are made of the whole step's counts, so there is no call without them to refuse"
)


def _tensor(values: Any, precision: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float64 if precision == "f64" else torch.float32)


def _mask(values: Any) -> Tensor:
    return torch.tensor(values).bool()


def _tolerance(precision: str, f64: float, f32: float = 4e-5) -> float:
    return f64 if precision == "f64" else f32


def advantage_comparisons(
    name: str, f64: float, case: Case, precision: str
) -> Iterator[Comparison]:
    """Off the mask ours is 0; what gae and remax publish there is left over from a sum, so it is
    not compared."""
    given, config = case.inputs, case.inputs.get("config", {})
    mask = _mask(given["response_mask"])
    norm = given.get("norm_adv_by_std_in_grpo", config.get("norm_adv_by_std_in_grpo", True))
    inputs = PaddedAdvantageInputs(
        token_level_rewards=_tensor(given["token_level_rewards"], precision),
        response_mask=mask,
        group=_groups(given.get("index", range(len(mask)))),
        values=_tensor(given["values"], precision) if "values" in given else None,
        baseline=_tensor(given["reward_baselines"], precision)
        if "reward_baselines" in given
        else None,
        gamma=given.get("gamma", config.get("gamma", 1.0)),
        lam=given.get("lam", 1.0),
        norm_adv_by_std_in_grpo=norm,
    )
    got = dict(
        zip(("advantages", "returns"), on_padded(advantages.estimator(name))(inputs), strict=True)
    )
    tolerance = _tolerance(precision, f64)
    if precision == "f32" and any(text in case.name for text in ILL_CONDITIONED):
        tolerance = 1e-4
    if name == "grpo" and 1 in torch.unique(inputs.group, return_counts=True)[1]:
        # The published 1 + 1e-6 is a float32 number whatever the inputs are
        tolerance = max(tolerance, 1e-7)
    for field, value in got.items():
        # The float64 result is the truth for both precisions: every input is exact in float32.
        on_mask = name in ("gae", "remax")
        yield Comparison(
            field, value, case.want("f64")[field], tolerance, mask if on_mask else None
        )
        yield Comparison(f"{field} off the mask", value[~mask], torch.zeros_like(value[~mask]), 0.0)


def _groups(ids: Iterable[Any]) -> Tensor:
    """Number group ids by first appearance: a vector may have texts or any numbers."""
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(one, len(numbers)) for one in ids])


def policy_comparisons(name: str, case: Case, precision: str) -> Iterator[Comparison]:
    given, want = case.inputs, case.want(precision)
    mask = _mask(given["response_mask"])
    log_prob = _tensor(given["log_prob"], precision).requires_grad_()
    old, adv = _tensor(given["old_log_prob"], precision), _tensor(given["advantages"], precision)
    defaults = {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "clip_ratio_c": 3.0,
    }
    config = SimpleNamespace(**{**defaults, "tau_pos": 1.0, "tau_neg": 1.05, **case.params})
    for bound in ("clip_ratio_low", "clip_ratio_high"):  # as the configuration fills them
        if getattr(config, bound) is None:
            setattr(config, bound, config.clip_ratio)
    loss_BT, stats = padded_loss(name)(log_prob, old, adv, mask, config)
    if given.get("rollout_is_weights") is not None:
        loss_BT = loss_BT * _tensor(given["rollout_is_weights"], precision)
    mode = registry.policy_loss(name).aggregation or case.params["loss_agg_mode"]
    loss = _aggregated(loss_BT, mask, mode, _counts(case))
    loss.backward()
    tolerance, departure, expected = (
        _tolerance(precision, 1e-6),
        "",
        (want["loss"], want["grad_log_prob"]),
    )
    if not mask.any():
        departure, expected = EMPTY_STEP, (0.0, torch.zeros_like(log_prob))
    for field, got, wanted in zip(
        ("loss", "grad_log_prob"), (loss.detach(), log_prob.grad), expected, strict=True
    ):
        yield Comparison(field, got, wanted, tolerance, departure=departure)
    for metric, value in want["metrics"].items():
        yield Comparison(
            metric,
            sequences.masked_mean(stats[metric.split("/")[1]], mask),
            value,
            max(tolerance, 1e-6),
        )


def _counts(case: Case) -> dict[str, Any]:
    """The counts of the whole step that the vector's part belongs to, wherever the vector has
    them."""
    names = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
    found: dict[str, Any] = {}
    for place in (case.inputs, case.params):
        for source in (place, place.get("global_batch_info") or {}):
            found |= {name: source[name] for name in names if source.get(name) is not None}
    return found


def _aggregated(loss_BT: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """The published ``agg_loss``: dp_size undoes the mean that data-parallel training takes of
    gradients."""
    return _weighted_sum(loss_BT, _weights(loss_BT, mask, mode, info)) * (info.get("dp_size") or 1)


def _weights(loss_BT: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """Weights over a step of which ``mask`` may be a part: ``info`` has the tokens and rows of the
    whole."""
    if mode == "token-sum":  # published, and no aggregation here
        return mask.to(loss_BT.dtype)
    width = info.get("loss_scale_factor") or mask.shape[-1]
    weight = padded_loss_weights(mask.to(loss_BT.dtype), mode, scale_factor=width)
    own, whole = int(mask.any(-1).sum()), info.get("global_batch_size")
    if mode == "token-mean":
        own, whole = int(mask.sum()), info.get("batch_num_tokens")
    return weight if whole is None else weight * (own / whole)


def _weighted_sum(loss_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """Without what stands where no token is, which may be NaN in a vector."""
    return (loss_BT.masked_fill(weight_BT == 0, 0) * weight_BT).sum()


def _agg_loss(case: Case, precision: str) -> Iterator[Comparison]:
    want = case.want(precision)
    loss_mat = _tensor(case.inputs["loss_mat"], precision).requires_grad_()
    mask = _mask(case.inputs["loss_mask"])
    loss = _aggregated(loss_mat, mask, case.params["loss_agg_mode"], case.params)
    if "error" in want:
        partial_counts = (case.params.get("dp_size") or 1) > 1
        yield Comparison(
            "loss", loss.detach(), want["error"], 0.0, departure=RANKS if partial_counts else ""
        )
        return
    loss.backward()
    expected, departure = want["loss"], ""
    if expected != expected:  # NaN
        departure, expected = NAN_OUTSIDE if bool(mask.any()) else EMPTY_STEP, loss.detach()
        assert loss.isfinite()
    yield Comparison(
        "loss", loss.detach(), expected, _tolerance(precision, 1e-6), departure=departure
    )
    if "grad" in want and not departure:
        yield Comparison("grad", loss_mat.grad, want["grad"], _tolerance(precision, 1e-6))


def _agg_loss_partition(case: Case, precision: str) -> Iterator[Comparison]:
    """Micro-batches take their rows of weights that were computed once, over the whole step."""
    loss_mat, mask = _tensor(case.inputs["loss_mat"], precision), _mask(case.inputs["loss_mask"])
    want, params = case.want(precision), case.params
    weight = _weights(loss_mat, mask, params["loss_agg_mode"], {**params, "batch_num_tokens": None})
    ranks = case.inputs["micro_batches_per_rank"]
    per_micro = [
        [float(_weighted_sum(loss_mat[rows], weight[rows])) * params["dp_size"] for rows in rank]
        for rank in ranks
    ]
    tolerance = _tolerance(precision, 1e-6)
    for got, expected in zip(per_micro, want["per_micro"], strict=True):
        yield Comparison("per_micro", got, expected, tolerance)
    total = sum(map(sum, per_micro)) / params["dp_size"]
    yield Comparison("mean_over_ranks_of_sum_over_micro", total, want["full_batch_loss"], tolerance)
    yield Comparison(
        "full_batch_loss", _weighted_sum(loss_mat, weight), want["full_batch_loss"], tolerance
    )


def _value_loss(case: Case, precision: str) -> Iterator[Comparison]:
    given, want, mask = case.inputs, case.want(precision), _mask(case.inputs["response_mask"])
    vpreds = _tensor(given["vpreds"], precision).requires_grad_()
    returns, old = _tensor(given["returns"], precision), _tensor(given["values"], precision)
    loss_BT, stats = losses.value_loss(vpreds, returns, old, case.params["cliprange_value"], mask)
    loss = _aggregated(loss_BT, mask, case.params["loss_agg_mode"], _counts(case))
    loss.backward()
    tolerance = _tolerance(precision, 1e-6)
    yield Comparison("vf_loss", loss.detach(), want["vf_loss"], tolerance)
    yield Comparison("grad_vpreds", vpreds.grad, want["grad_vpreds"], tolerance)
    yield Comparison(
        "vf_clipfrac", sequences.masked_mean(stats["vf_clipfrac"], mask), want["vf_clipfrac"], 1e-6
    )


def _kl_penalty(case: Case, precision: str) -> Iterator[Comparison]:
    log_prob = _tensor(case.inputs["logprob"], precision).requires_grad_()
    ref = _tensor(case.inputs["ref_logprob"], precision)
    value = kl.kl_penalty(log_prob, ref, case.params["kl_penalty"])
    value.sum().backward()
    want = case.want(precision)
    yield Comparison("kl", value.detach(), want["kl"], _tolerance(precision, 1e-9))
    yield Comparison(
        "grad", log_prob.grad, want["grad_sum_wrt_logprob"], _tolerance(precision, 1e-9)
    )


def _apply_kl_penalty(case: Case, precision: str) -> Iterator[Comparison]:
    given, params, want = case.inputs, case.params, case.want(precision)
    scores, mask = _tensor(given["token_level_scores"], precision), _mask(given["response_mask"])
    log_probs = {
        name: _tensor(given[name], precision) for name in ("old_log_probs", "ref_log_prob")
    }
    batch = batch_of_padded(
        attention_mask=torch.ones_like(mask), response_mask=mask, loss_mask=mask, **log_probs
    )
    controller = kl.KLController(
        params["type"], params["kl_coef"], params["target_kl"], params["horizon"]
    )
    penalties, controller, metrics = kl.kl_rewards(batch, controller, params["kl_penalty"])
    rewards = scores + penalties.view(scores.shape)
    tolerance = _tolerance(precision, 1e-6)
    yield Comparison("token_level_rewards", rewards, want["token_level_rewards"], tolerance)
    yield Comparison("coef_after", controller.value, want["coef_after"], tolerance)
    for name, value in want["metrics"].items():
        yield Comparison(name, metrics[name], value, tolerance)


def _kl_controller(case: Case, precision: str) -> Iterator[Comparison]:
    params = case.params
    controller = kl.KLController(
        params["type"],
        params["kl_coef"],
        params.get("target_kl", 0.1),
        params.get("horizon", 10000),
    )
    values = []
    for current in case.inputs["current_kl"]:
        controller = controller.updated(current, params.get("n_steps", 1))
        values.append(controller.value)
    yield Comparison(
        "value_after_each_update", values, case.want("f64")["value_after_each_update"], 1e-9
    )


def _masked_ops(case: Case, precision: str) -> Iterator[Comparison]:
    """Here a mask selects before whitening, so what is published outside it has no counterpart."""
    values, mask = _tensor(case.inputs["values"], precision), _mask(case.inputs["mask"])
    want = case.want(precision)
    mean = sequences.masked_mean(values, mask)
    whitened = torch.zeros_like(values).masked_scatter(mask, sequences.whiten(values[mask]))
    for name, got in (("masked_sum", mean * mask.sum()), ("masked_mean", mean)):
        yield Comparison(name, got, want[name], _tolerance(precision, 1e-6))
    if "masked_mean_axis-1" in want:
        by_row = _by_row(values, mask)
        yield Comparison(
            "masked_mean_axis-1", by_row, want["masked_mean_axis-1"], _tolerance(precision, 1e-6)
        )
    yield Comparison(
        "masked_whiten", whitened, want["masked_whiten"], _tolerance(precision, 1e-5), mask
    )


def _by_row(values: Tensor, mask: Tensor) -> Tensor:
    lengths = torch.full((len(mask),), mask.shape[1])
    return sequences.mean_by_sequence(values.flatten(), mask.flatten(), lengths)


def _lr_schedule(case: Case, precision: str) -> Iterator[Comparison]:
    params, expected = case.params, case.expected["lr_at_step"]
    warmup, total = params["num_warmup_steps"], params.get("num_training_steps", 0)

    def wsd(i: int) -> float:  # no key selects it: it is one schedule, then the other
        stable = warmup + int((total - warmup) * params["stable_ratio"])
        if i < stable:
            return step_settings.constant(i, warmup)
        return step_settings.cosine(min(i, total), stable, total, params["min_lr_ratio"])

    functions = {
        "constant": lambda i: step_settings.constant(i, warmup),
        "cosine": lambda i: step_settings.cosine(i, warmup, total, params["min_lr_ratio"]),
        "wsd": wsd,
    }
    yield Comparison(
        "lr_at_step", [functions[params["type"]](i) for i in range(len(expected))], expected, 1e-12
    )


def _entropy_logprob(case: Case, precision: str) -> Iterator[Comparison]:
    """Logits go through the head as hidden states of an identity matrix, in chunks of two
    tokens."""
    logits, labels = _tensor(case.inputs["logits"], precision), torch.tensor(case.inputs["labels"])
    vocabulary, want = logits.shape[-1], case.want("f64")
    log_prob, entropy = token_log_probs_and_entropy(
        logits.reshape(-1, vocabulary),
        torch.eye(vocabulary, dtype=logits.dtype),
        labels.reshape(-1),
        chunk_elements=2 * vocabulary,
    )
    yield Comparison(
        "logprobs", log_prob.reshape(labels.shape), want["logprobs"], _tolerance(precision, 1e-9)
    )
    yield Comparison(
        "entropy", entropy.reshape(labels.shape), want["entropy"], _tolerance(precision, 1e-9)
    )


ADAPTERS: dict[str, Adapter] = {
    "adv_gae": partial(advantage_comparisons, "gae", 1e-5),
    "adv_grpo": partial(advantage_comparisons, "grpo", 1e-9),
    "agg_loss": _agg_loss,
    "agg_loss_partition": _agg_loss_partition,
    "apply_kl_penalty": _apply_kl_penalty,
    "entropy_logprob": _entropy_logprob,
    "kl_controller": _kl_controller,
    "kl_penalty": _kl_penalty,
    "lr_schedule": _lr_schedule,
    "masked_ops": _masked_ops,
    "policy_vanilla": partial(policy_comparisons, "vanilla"),
    "value_loss": _value_loss,
    **golden_mismatch.ADAPTERS,
    **golden_dapo.ADAPTERS,
}
