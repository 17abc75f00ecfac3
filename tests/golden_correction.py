"""How the golden vectors of rollout correction map onto ``core.algorithm.rollout_mismatch``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, stdev

import torch
from torch import Tensor

from core.algorithm import rollout_mismatch as mismatch
from core.algorithm.losses import MetricSums
from core.extensions.variants import keys as correction_bounds
from core.extensions.variants import rollout_correction as rc
from core.types import TrainBatch
from tests.golden_io import Case, Comparison
from tests.padded import batch_of_padded

Values = Mapping[str, float]

EMPTY_ROW = "a sequence without a token is left out of means over sequences; published: counted, as 0 (perplexity 1)"
NOTHING_LEFT = "with every weight 0 the effective sample size is 0 and weights stay 0; published: a division by zero"


def _given(case: Case, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if precision == "f64" else torch.float32
    old, rollout = (torch.tensor(case.inputs[name], dtype=dtype) for name in ("old_log_prob", "rollout_log_prob"))
    return old, rollout, torch.tensor(case.inputs["response_mask"]).bool()


def _lengths(mask: Tensor) -> Tensor:
    return torch.full((len(mask),), mask.shape[1])


def batch_of(old: Tensor, rollout: Tensor, mask: Tensor) -> TrainBatch:
    """A batch in which only the log-probs matter."""
    return batch_of_padded(
        input_ids=torch.zeros(mask.shape, dtype=torch.int64),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        loss_mask=mask,
        group=torch.arange(len(mask)),
        reward=torch.zeros(len(mask)),
        in_group_stats=torch.ones(len(mask), dtype=torch.bool),
        rollout_log_probs=rollout,
        old_log_probs=old,
    )


def _weights(case: Case, precision: str) -> Iterator[Comparison]:
    want, params = case.want(precision), case.params
    bounds, level = correction_bounds.weight_bounds(params["rollout_is_threshold"]), params.get("rollout_is", "token")
    old, rollout, mask = _given(case, precision)
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
    yield from _compared(metrics, want["metrics"], _weights_of_rows(case), max(tolerance, 1e-5))


def _rejection(case: Case, precision: str) -> Iterator[Comparison]:
    want, params = case.want(precision), case.params
    wanted = correction_bounds.criteria(params["rollout_rs"], params["rollout_rs_threshold"])
    old, rollout, mask = _given(case, precision)
    lengths, flat_mask = _lengths(mask), mask.flatten()
    ratio = rc.log_ratio(old.flatten(), rollout.flatten(), flat_mask)
    kept = rc.kept_tokens(ratio, flat_mask, lengths, wanted).view(mask.shape)
    yield Comparison("mask", kept, want["mask"], 0.0)
    metrics = rc.rejection_metrics(ratio, flat_mask, lengths, wanted)
    yield from _compared(metrics, want["metrics"], _rejected_rows(case), 1e-5 if precision == "f64" else 4e-5)


def _mismatch(case: Case, precision: str) -> Iterator[Comparison]:
    means, batch = MetricSums(), batch_of(*_given(case, precision))
    mismatch.add_mismatch(means, batch.old_log_probs, batch)
    got = {name.removeprefix("rollout_corr/"): value for name, value in means.result("rollout_corr").items()}
    yield from _compared(got, case.want(precision), _perplexities(case), 1e-6 if precision == "f64" else 4e-5)


def _compared(got: Values, want: Values, of_rows: Values, tolerance: float) -> Iterator[Comparison]:
    """``of_rows`` stand in for published values where a row is empty; there are none elsewhere."""
    for name, value in want.items():
        departure = EMPTY_ROW if name in of_rows else ""
        yield Comparison(name, got[name], of_rows.get(name, value), tolerance, departure=departure)


def _rows(case: Case) -> list[list[tuple[float, float]]]:
    """(learner, engine) log-probs of the rows that have a token, where there is one that has none; else nothing."""
    columns = (case.inputs[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
    rows = [[(a, b) for a, b, one in zip(*row, strict=True) if one] for row in zip(*columns, strict=True)]
    return [row for row in rows if row] if not all(rows) else []


def _weights_of_rows(case: Case) -> Values:
    """Of weights that are truncated or, where the threshold has two bounds, dropped outside of them."""
    if not (rows := _rows(case)):
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
    if not (rows := _rows(case)):
        return {}
    bound = float(case.params["rollout_rs_threshold"])
    return {"rollout_rs_seq_masked_fraction": fmean(any((a - b) ** 2 / 2 > bound for a, b in row) for row in rows)}


def _perplexities(case: Case) -> Values:
    if not (rows := _rows(case)):
        return {}
    training, rollout = ([-fmean(pair[i] for pair in row) for row in rows] for i in (0, 1))
    gaps = [a - b for a, b in zip(training, rollout, strict=True)]
    return {
        "training_ppl": fmean(map(math.exp, training)),
        "training_log_ppl": fmean(training),
        "rollout_ppl": fmean(map(math.exp, rollout)),
        "rollout_log_ppl": fmean(rollout),
        "log_ppl_diff": fmean(gaps),
        "log_ppl_abs_diff": fmean(map(abs, gaps)),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": fmean(map(math.exp, gaps)),
        "chi2_seq": fmean(math.exp(2 * sum(a - b for a, b in row)) for row in rows) - 1,
    }


ADAPTERS = {"rollout_corr_is": _weights, "rollout_corr_rs": _rejection, "rollout_corr_metrics": _mismatch}
