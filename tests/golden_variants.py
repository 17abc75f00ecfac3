"""How the golden vectors of this extension's estimators, losses and corrections map onto its
functions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from core.algorithm import correction_bounds
from core.algorithm import rollout_correction as rc
from tests.golden_adapters import Adapter, advantage_comparisons, policy_comparisons
from tests.golden_io import Case, Comparison
from tests.golden_mismatch import compared, log_probs_of

NOTHING_LEFT = (
    "with every weight 0 the effective sample size is 0 and weights stay 0; published: "
    "a division by zero"
)


def _ratios(case: Case, precision: str) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """Return log-ratio and mask of rows without padding, their lengths, and the shape."""
    old, rollout, mask = log_probs_of(case, precision)
    lengths = torch.full((len(mask),), mask.shape[1])
    return (
        rc.log_ratio(old.flatten(), rollout.flatten(), mask.flatten()),
        mask.flatten(),
        lengths,
        mask.shape,
    )


def _weights(case: Case, precision: str) -> Iterator[Comparison]:
    want, params = case.want(precision), case.params
    bounds, level = (
        correction_bounds.weight_bounds(params["rollout_is_threshold"]),
        params.get("rollout_is", "token"),
    )
    ratio, mask, lengths, shape = _ratios(case, precision)
    applied, raw = rc.importance_weights(ratio, mask, lengths, level, bounds)
    metrics = rc.weight_metrics(applied, raw, mask, lengths, level, bounds)
    if params.get("rollout_is_batch_normalize"):
        metrics["rollout_is_batch_norm_factor"] = factor = rc.normalising_factor(
            applied, mask, lengths, level
        )
        applied = applied / factor
    if "error" in want:
        assert not applied.any() and metrics["rollout_is_eff_sample_size"] == 0
        yield Comparison("weights", applied, torch.zeros_like(applied), 0.0, departure=NOTHING_LEFT)
        return
    yield Comparison(
        "weights", applied.view(shape), want["weights"], 1e-6 if precision == "f64" else 4e-5
    )
    names = ("mean", "std", "max", "min", "max_deviation", "fraction_high", "fraction_low")
    yield from compared(
        case, precision, metrics, [f"rollout_is_seq_{name}" for name in names], 1e-5
    )


def _rejection(case: Case, precision: str) -> Iterator[Comparison]:
    wanted = correction_bounds.criteria(
        case.params["rollout_rs"], case.params["rollout_rs_threshold"]
    )
    ratio, mask, lengths, shape = _ratios(case, precision)
    yield Comparison(
        "mask",
        rc.kept_tokens(ratio, mask, lengths, wanted).view(shape),
        case.want(precision)["mask"],
        0.0,
    )
    metrics = rc.rejection_metrics(ratio, mask, lengths, wanted)
    yield from compared(case, precision, metrics, ["rollout_rs_seq_masked_fraction"], 1e-5)


ADAPTERS: dict[str, Adapter] = {
    "adv_gpg": partial(advantage_comparisons, "gpg", 1e-9),
    "adv_grpo_passk": partial(advantage_comparisons, "grpo_passk", 1e-9),
    "adv_opo": partial(advantage_comparisons, "opo", 1e-9),
    "adv_reinforce_plus_plus": partial(advantage_comparisons, "reinforce_plus_plus", 1e-5),
    "adv_reinforce_plus_plus_baseline": partial(
        advantage_comparisons, "reinforce_plus_plus_baseline", 1e-5
    ),
    "adv_remax": partial(advantage_comparisons, "remax", 1e-9),
    "adv_rloo": partial(advantage_comparisons, "rloo", 1e-9),
    "policy_cispo": partial(policy_comparisons, "cispo"),
    "policy_gpg": partial(policy_comparisons, "gpg"),
    "policy_gspo": partial(policy_comparisons, "gspo"),
    "policy_reinforce": partial(policy_comparisons, "reinforce"),
    "policy_sapo": partial(policy_comparisons, "sapo"),
    "rollout_corr_is": _weights,
    "rollout_corr_rs": _rejection,
}
