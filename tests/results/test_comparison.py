"""Comparisons of seeds and of runs: intervals worked out by hand, and simulated runs of known
accuracy."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from core.tracking.validation import Estimate, ValRecord, validation_metrics
from results.reporting.comparison import (
    holm,
    paired_comparison,
    question_p,
    seed_interval,
    welch_interval,
    welch_p,
)
from results.reporting.comparison_report import Compared, Side, comparison
from results.reporting.numbers import percent
from results.reporting.pages import Table
from results.reporting.run_reader import load_run
from tests.core.synthetic import configured, make_run


def test_seeds_by_hand():
    estimate = seed_interval([1.0, 2.0, 4.0])
    assert (estimate.value, estimate.n) == (pytest.approx(7 / 3), 3)
    assert estimate.sd == pytest.approx(1.5275252)
    half = 4.3026527 * 1.5275252 / math.sqrt(3)
    assert (estimate.low, estimate.high) == pytest.approx((7 / 3 - half, 7 / 3 + half))
    single = seed_interval([0.4])
    assert (single.value, single.sd, single.low, single.high, single.n) == (
        0.4,
        None,
        None,
        None,
        1,
    )
    near = seed_interval([0.97, 1.0])
    assert near.low == pytest.approx(0.985 - 12.7062047 * 0.015, abs=1e-6) and near.high == 1.0
    assert seed_interval([0.0, 0.03]).low == 0.0 and seed_interval([0.9, 1.1]).high > 1.5


def test_seeds_that_agree_by_chance_have_the_interval_over_questions():
    """A mean of equal seeds had no width at all."""
    of_seed = Estimate(0.35, 0.29, 0.42, 200)
    equal = seed_interval([0.35, 0.35, 0.35], [of_seed] * 3)
    assert (equal.value, equal.sd, equal.over_questions) == (pytest.approx(0.35), 0.0, True)
    assert (equal.low, equal.high) == (pytest.approx(0.29), pytest.approx(0.42))
    assert percent(equal) == "35.0 ± 0.0 [29.0, 42.0] over questions"
    apart = seed_interval([0.25, 0.35, 0.45], [of_seed] * 3)
    assert apart == seed_interval([0.25, 0.35, 0.45]) and not apart.over_questions
    assert not seed_interval([0.3, 0.3], [Estimate(0.3, None, None, 1)] * 2).over_questions


def test_welch_by_hand():
    a, b = [1.0, 2.0, 4.0], [5.0, 5.5, 6.0, 8.0]
    estimate = welch_interval(a, b)
    va, vb = statistics.variance(a) / 3, statistics.variance(b) / 4
    df = (va + vb) ** 2 / (va**2 / 2 + vb**2 / 3)
    assert int(df) == 4
    assert estimate.value == pytest.approx(6.125 - 7 / 3)
    assert estimate.high - estimate.low == pytest.approx(2 * 2.7764451 * math.sqrt(va + vb))
    assert welch_interval([1.0], b).low is None


def test_a_difference_over_seeds_that_agree_is_no_surer_than_over_questions():
    """Two seeds of 80.0 and 80.1 against 83.0 and 83.1: not p < 0.001 of 40 questions."""

    def side(right: int, seeds: list[float]) -> Side:
        return Side([], seeds, {str(i): float(i < right) for i in range(40)})

    a, b = side(32, [0.8, 0.801]), side(33, [0.83, 0.831])
    p = welch_p(a.seeds, b.seeds)
    both = Compared("s", "acc", a, b, question_p(a.questions, b.questions), p)
    assert p < 0.01 and both.rests_on_questions and both.outcome == ""
    assert both.difference.low < 0 < both.difference.high
    apart = Compared("s", "acc", a, side(40, [0.9, 0.97]), 0.01, 0.04)
    assert not apart.rests_on_questions and apart.verdict == "better over seeds"


def test_one_shared_question_leaves_the_verdict_to_the_seeds():
    a, b = Side([], [0.1, 0.2], {"q": 0.5}), Side([], [0.8, 0.9], {"q": 1.0})
    both = Compared("s", "acc", a, b, None, 0.01)
    assert not both.rests_on_questions and both.verdict == "better over seeds"


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
    # no difference, and no shared question
    same = paired_comparison({str(i): 1.0 for i in range(100)}, {str(i): 1.0 for i in range(100)})
    assert (same.difference.low, same.difference.high) == pytest.approx((-0.0370, 0.0370), abs=1e-4)
    with pytest.raises(ValueError, match="share none"):
        paired_comparison({"a": 1.0}, {"b": 1.0})


# --- simulated runs: what is called a difference is one ---


def answered(rng, accuracy: float, difficulty: np.ndarray) -> dict[str, float]:
    """0/1 answers of a policy of this expected accuracy: hard questions are wrong more often, in
    every policy."""
    right = rng.uniform(size=len(difficulty)) < np.clip(accuracy + 0.3 * (difficulty - 0.5), 0, 1)
    return {f"q{i}": float(value) for i, value in enumerate(right)}


def at_most(count: int, share: float, n: int) -> bool:
    """Whether a count of n is no more than a share of 5 %, say, gives but once in 1,000
    repetitions."""
    return count <= n * share + 3.1 * math.sqrt(n * share * (1 - share))


def test_runs_of_known_accuracy_give_the_right_verdicts(tmp_path):
    """Four experiments of five seeds against a baseline."""
    template = load_run(make_run(tmp_path / "grpo" / "one", configured(), steps=1, questions=5))
    rng = np.random.default_rng(7)
    true = {"base": 0.60, "same": 0.60, "up": 0.70, "top": 0.80, "low": 0.40}
    difficulty = rng.uniform(size=1000)

    def simulated(name: str, seed: int):
        values = answered(rng, true[name] + rng.normal(0, 0.01), difficulty)
        rows = [ValRecord(uid, "lab/hops", {"acc": (value,)}) for uid, value in values.items()]
        config = {**template.config, "trainer.seed": seed, "made.for": name}
        manifest = {**template.manifest, "recipe": "sim", "run": f"{name}-seed{seed}"}
        metrics = [{"step": 0.0, **validation_metrics(rows)}]
        return replace(
            template,
            config=config,
            manifest=manifest,
            metrics=metrics,
            validation={0: rows},
            samples=(),
        )

    tables = comparison([[simulated(name, seed) for seed in range(1, 6)] for name in true])
    table = next(block for block in tables if isinstance(block, Table))
    verdicts = {row[0].split(" − ")[0].removeprefix("sim/"): row[-1] for row in table.rows}
    assert len(verdicts) == 4
    for name, verdict in verdicts.items():
        word = (
            "better"
            if true[name] > 0.60
            else "worse"
            if true[name] < 0.60
            else "no difference was shown"
        )
        assert verdict == f"{word} over seeds", name


def test_equal_policies_are_rarely_called_different():
    """By question, over seeds, and in any of nine comparisons at once."""
    rng, difficulty = np.random.default_rng(1), np.random.default_rng(2).uniform(size=200)
    found = {"questions": 0, "missed": 0, "seeds": 0, "nine": 0}
    for _ in range(200):
        a, b = (answered(rng, 0.6, difficulty) for _ in range(2))
        interval = paired_comparison(a, b).difference
        found["questions"] += question_p(a, b) < 0.05
        found["missed"] += not interval.low <= 0 <= interval.high
        base, *others = (list(rng.normal(0.6, 0.01, 3)) for _ in range(10))
        found["seeds"] += welch_p(base, others[0]) < 0.05
        found["nine"] += (
            min(holm({i: welch_p(base, other) for i, other in enumerate(others)}).values()) < 0.05
        )
    assert all(at_most(count, 0.05, 200) for count in found.values()), found
