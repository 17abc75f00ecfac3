"""How the golden vectors of this extension's estimators, losses and corrections map onto its functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from statistics import fmean, stdev

import torch
from torch import Tensor

from core.algorithm import rollout_correction as rc
from core.config import training_keys as correction_bounds
from tests.golden_adapters import Adapter, advantage_comparisons, policy_comparisons
from tests.golden_io import Case, Comparison
from tests.golden_mismatch import Values, compared, log_probs_of, rows_of

NOTHING_LEFT = "with every weight 0 the effective sample size is 0 and weights stay 0; published: a division by zero"


def _lengths(mask: Tensor) -> Tensor:
    return torch.full((len(mask),), mask.shape[1])


def _weights(case: Case, precision: str) -> Iterator[Comparison]:
    want, params = case.want(precision), case.params
    bounds, level = correction_bounds.weight_bounds(params["rollout_is_threshold"]), params.get("rollout_is", "token")
    old, rollout, mask = log_probs_of(case, precision)
    lengths, flat_mask = _lengths(mask), mask.flatten()
    ratio = rc.log_ratio(old.flatten(), rollout.flatten(), flat_mask)
    applied, raw = rc.importance_weights(ratio, flat_mask, lengths, level, bounds)
    metrics = rc.weight_metrics(applied, raw, flat_mask, lengths, level, bounds)
    if params.get("rollout_is_batch_normalize"):
        metrics["rollout_is_batch_norm_factor"] = factor = rc.normalising_factor(applied, flat_mask, lengths, level)
        applied = applied / factor
    applied = applied.view(mask.shape)
    if "error" in want:
        assert not applied.any() and metrics["rollout_is_eff_sample_size"] == 0
        yield Comparison("weights", applied, torch.zeros_like(applied), 0.0, departure=NOTHING_LEFT)
        return
    tolerance = 1e-6 if precision == "f64" else 4e-5
    yield Comparison("weights", applied, want["weights"], tolerance)
    yield from compared(metrics, want["metrics"], _weights_of_rows(case), max(tolerance, 1e-5))


def _rejection(case: Case, precision: str) -> Iterator[Comparison]:
    want, params = case.want(precision), case.params
    wanted = correction_bounds.criteria(params["rollout_rs"], params["rollout_rs_threshold"])
    old, rollout, mask = log_probs_of(case, precision)
    lengths, flat_mask = _lengths(mask), mask.flatten()
    ratio = rc.log_ratio(old.flatten(), rollout.flatten(), flat_mask)
    kept = rc.kept_tokens(ratio, flat_mask, lengths, wanted).view(mask.shape)
    yield Comparison("mask", kept, want["mask"], 0.0)
    metrics = rc.rejection_metrics(ratio, flat_mask, lengths, wanted)
    yield from compared(metrics, want["metrics"], _rejected_rows(case), 1e-5 if precision == "f64" else 4e-5)


def _weights_of_rows(case: Case) -> Values:
    """Of weights that are truncated or, where the threshold has two bounds, dropped outside of them."""
    if not (rows := rows_of(case)):
        return {}
    bounds = correction_bounds.weight_bounds(case.params["rollout_is_threshold"])
    upper, lower = bounds.upper, 1 / bounds.upper if bounds.lower is None else bounds.lower
    weights = [[math.exp(a - b) for a, b in row] for row in rows]
    if case.params.get("rollout_is") == "sequence":
        weights = [[math.exp(sum(a - b for a, b in row))] for row in rows]

    def applied(weight: float) -> float:
        return min(upper, weight) if bounds.lower is None else weight * (lower <= weight <= upper)

    raw = [fmean(row) for row in weights]
    means = [fmean(map(applied, row)) for row in weights]
    found = {
        "mean": fmean(means),
        "std": stdev(means) if len(means) > 1 else 0.0,
        "max": max(means),
        "min": min(means),
        "max_deviation": max(abs(mean - 1) for mean in means),
        "fraction_high": fmean(mean > upper for mean in raw),
        "fraction_low": fmean(mean < lower for mean in raw),
    }
    return {f"rollout_is_seq_{name}": value for name, value in found.items()}


def _rejected_rows(case: Case) -> Values:
    """Of ``token_k2``."""
    if not (rows := rows_of(case)):
        return {}
    bound = float(case.params["rollout_rs_threshold"])
    return {"rollout_rs_seq_masked_fraction": fmean(any((a - b) ** 2 / 2 > bound for a, b in row) for row in rows)}


ADAPTERS: dict[str, Adapter] = {
    "adv_gpg": partial(advantage_comparisons, "gpg", 1e-9),
    "adv_grpo_passk": partial(advantage_comparisons, "grpo_passk", 1e-9),
    "adv_opo": partial(advantage_comparisons, "opo", 1e-9),
    "adv_reinforce_plus_plus": partial(advantage_comparisons, "reinforce_plus_plus", 1e-5),
    "adv_reinforce_plus_plus_baseline": partial(advantage_comparisons, "reinforce_plus_plus_baseline", 1e-5),
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
