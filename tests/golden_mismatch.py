"""How the golden vectors of the difference between engine and learner map onto ``add_mismatch``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean

import torch
from torch import Tensor

from core.algorithm import rollout_correction as mismatch
from core.algorithm.losses import MetricSums
from core.types import TrainBatch
from tests.golden_io import Case, Comparison
from tests.padded import batch_of_padded

Values = Mapping[str, float]

EMPTY_ROW = "a sequence without a token is left out of means over sequences; published: counted, as 0 (perplexity 1)"


def log_probs_of(case: Case, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if precision == "f64" else torch.float32
    old, rollout = (torch.tensor(case.inputs[name], dtype=dtype) for name in ("old_log_prob", "rollout_log_prob"))
    return old, rollout, torch.tensor(case.inputs["response_mask"]).bool()


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


def _mismatch(case: Case, precision: str) -> Iterator[Comparison]:
    means, batch = MetricSums(), batch_of(*log_probs_of(case, precision))
    mismatch.add_mismatch(means, batch.old_log_probs, batch)
    got = {name.removeprefix("rollout_corr/"): value for name, value in means.result("rollout_corr").items()}
    yield from compared(got, case.want(precision), _perplexities(case), 1e-6 if precision == "f64" else 4e-5)


def compared(got: Values, want: Values, of_rows: Values, tolerance: float) -> Iterator[Comparison]:
    """``of_rows`` stand in for published values where a row is empty; there are none elsewhere."""
    for name, value in want.items():
        departure = EMPTY_ROW if name in of_rows else ""
        yield Comparison(name, got[name], of_rows.get(name, value), tolerance, departure=departure)


def rows_of(case: Case) -> list[list[tuple[float, float]]]:
    """(learner, engine) log-probs of the rows that have a token, where there is one that has none; else nothing."""
    columns = (case.inputs[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
    rows = [[(a, b) for a, b, one in zip(*row, strict=True) if one] for row in zip(*columns, strict=True)]
    return [row for row in rows if row] if not all(rows) else []


def _perplexities(case: Case) -> Values:
    if not (rows := rows_of(case)):
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


ADAPTERS = {"rollout_corr_metrics": _mismatch}
