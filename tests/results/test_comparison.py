"""Comparisons of seeds and of runs: intervals and differences worked out by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from core.tracking.confidence_intervals import question_interval
from results.reporting.comparison import paired_comparison, seed_interval, welch_interval


def test_seeds_by_hand():
    estimate = seed_interval([1.0, 2.0, 4.0])
    assert (estimate.value, estimate.n) == (pytest.approx(7 / 3), 3)
    assert estimate.sd == pytest.approx(1.5275252)
    half = 4.3026527 * 1.5275252 / math.sqrt(3)
    assert (estimate.low, estimate.high) == pytest.approx((7 / 3 - half, 7 / 3 + half))
    single = seed_interval([0.4])
    assert (single.value, single.sd, single.low, single.high, single.n) == (0.4, None, None, None, 1)
    near = seed_interval([0.97, 1.0])
    assert near.low == pytest.approx(0.985 - 12.7062047 * 0.015, abs=1e-6) and near.high == 1.0
    assert seed_interval([0.0, 0.03]).low == 0.0 and seed_interval([0.9, 1.1]).high > 1.5


def test_welch_by_hand():
    a, b = [1.0, 2.0, 4.0], [5.0, 5.5, 6.0, 8.0]
    estimate = welch_interval(a, b)
    va, vb = statistics.variance(a) / 3, statistics.variance(b) / 4
    df = (va + vb) ** 2 / (va**2 / 2 + vb**2 / 3)
    assert int(df) == 4
    assert estimate.value == pytest.approx(6.125 - 7 / 3)
    assert estimate.high - estimate.low == pytest.approx(2 * 2.7764451 * math.sqrt(va + vb))
    assert welch_interval([1.0], b).low is None


# --- paired comparison ---


def test_paired_difference_by_hand():
    a = {"1": 0.0, "2": 1.0, "3": 0.5, "4": 1.0, "only a": 1.0}
    b = {"1": 1.0, "2": 1.0, "3": 0.75, "4": 0.5, "only b": 0.0, "also": 0.0}
    paired = paired_comparison(a, b)
    assert paired.difference.value == pytest.approx((1.0 + 0.0 + 0.25 - 0.5) / 4)
    assert (paired.better, paired.worse, paired.only_a, paired.only_b) == (2, 1, 1, 2)
    half = 3.1824463 * statistics.stdev([1.0, 0.0, 0.25, -0.5]) / 2
    assert paired.difference.high == pytest.approx(paired.difference.value + half)
    assert paired_comparison(b, a).difference.value == pytest.approx(-paired.difference.value)


def test_pairing_is_narrower_than_two_intervals():
    """Questions of unequal difficulty, one run a little better: only the paired interval excludes zero."""
    difficulty = np.linspace(0, 1, 400)
    a = {str(i): float(d < 0.50) for i, d in enumerate(difficulty)}
    b = {str(i): float(d < 0.55) for i, d in enumerate(difficulty)}
    paired = paired_comparison(a, b)
    alone = [question_interval(list(each.values())) for each in (a, b)]
    assert paired.difference.low > 0
    assert alone[0].high > alone[1].low


def test_no_difference_and_no_shared_question():
    same = paired_comparison({str(i): 1.0 for i in range(100)}, {str(i): 1.0 for i in range(100)})
    assert (same.difference.low, same.difference.high) == pytest.approx((-0.0370, 0.0370), abs=1e-4)
    with pytest.raises(ValueError, match="share none"):
        paired_comparison({"a": 1.0}, {"b": 1.0})
