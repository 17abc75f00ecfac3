"""How the golden vectors of the difference between engine and learner map onto ``add_mismatch``."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

from core.algorithm import rollout_correction as mismatch
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch
from tests.golden_io import Case, Comparison
from tests.padded import batch_of_padded

Values = Mapping[str, float]

MEANS_OVER_ROWS = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
)
MEANS_OVER_ROWS += (
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
    "chi2_seq",
)
EMPTY_ROW = (
    "a sequence without a token is left out of means over sequences; published: counted, "
    "as 0 (perplexity 1)"
)


def log_probs_of(case: Case, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if precision == "f64" else torch.float32
    old, rollout = (
        torch.tensor(case.inputs[name], dtype=dtype)
        for name in ("old_log_prob", "rollout_log_prob")
    )
    return old, rollout, torch.tensor(case.inputs["response_mask"]).bool()


def batch_of(old: Tensor, rollout: Tensor, mask: Tensor) -> TrainBatch:
    """A batch in which only the log-probs matter."""
    fields = dict(
        input_ids=torch.zeros(mask.shape, dtype=torch.int64), response_mask=mask, loss_mask=mask
    )
    fields |= dict(group=torch.arange(len(mask)), reward=torch.zeros(len(mask)))
    fields |= dict(in_group_stats=torch.ones(len(mask), dtype=torch.bool))
    return batch_of_padded(
        attention_mask=torch.ones_like(mask), rollout_log_probs=rollout, old_log_probs=old, **fields
    )


def _mismatch(case: Case, precision: str) -> Iterator[Comparison]:
    means, batch = MetricSums(), batch_of(*log_probs_of(case, precision))
    mismatch.add_mismatch(means, batch.old_log_probs, batch)
    got = {
        name.removeprefix("rollout_corr/"): value
        for name, value in means.result("rollout_corr").items()
    }
    yield from compared(case, precision, got, MEANS_OVER_ROWS, 1e-6)


def compared(
    case: Case, precision: str, got: Values, over_rows: Container[str], f64: float
) -> Iterator[Comparison]:
    """Compare metrics; where a row is empty, those over rows depart: tests of their own compare
    them."""
    want = case.want(precision)
    for name, value in (want.get("metrics") or want).items():
        departs = name in over_rows and not all(map(any, case.inputs["response_mask"]))
        wanted, departure = (got[name], EMPTY_ROW) if departs else (value, "")
        yield Comparison(
            name,
            got[name],
            wanted,
            f64 if precision == "f64" else max(f64, 4e-5),
            departure=departure,
        )


ADAPTERS = {"rollout_corr_metrics": _mismatch}
