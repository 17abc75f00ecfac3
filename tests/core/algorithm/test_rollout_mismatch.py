"""Metrics of the difference between engine and learner."""

import pytest

from tests.golden_adapters import ADAPTERS
from tests.golden_io import check, parameters


@pytest.mark.parametrize("case", parameters(("rollout_corr_metrics",)))
def test_golden_mismatch(case):
    for precision in ("f64", "f32"):
        check(ADAPTERS[case.file](case, precision), case.want(precision))
