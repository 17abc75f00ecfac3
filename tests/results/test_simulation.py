"""Simulated runs of known accuracy: the tables are right, and what is called a difference is one.

The slow tests repeat the fast ones with 1,000 pairs at several sizes and accuracies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from core.tracking.validation import ValRecord, validation_metrics
from results.reporting.comparison import holm, paired_comparison, question_p, welch_interval, welch_p
from results.reporting.comparison_report import comparison
from results.reporting.pages import Table
from results.reporting.run_reader import RecordedRun, load_run
from tests.core.synthetic import configured, make_run

SOURCE = "lab/hops"


def at_most(count: int, share: float, n: int) -> bool:
    """Whether a count of n is no more than a share of 5 %, say, gives but once in 1,000 repetitions."""
    return count <= n * share + 3.1 * math.sqrt(n * share * (1 - share))


def answered(rng: np.random.Generator, accuracy: float, questions: int, difficulty: np.ndarray) -> np.ndarray:
    """0/1 answers of a policy of this expected accuracy: hard questions are wrong more often, in every policy."""
    return (rng.uniform(size=questions) < np.clip(accuracy + 0.3 * (difficulty - 0.5), 0, 1)).astype(float)


def by_uid(values: np.ndarray) -> Mapping[str, float]:
    return {f"q{i}": float(value) for i, value in enumerate(values)}


# --- the tables ---


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> RecordedRun:
    return load_run(make_run(tmp_path_factory.mktemp("runs") / "grpo" / "one", configured(), steps=1, questions=5))


def simulated(template: RecordedRun, name: str, seed: int, values: np.ndarray) -> RecordedRun:
    rows = [ValRecord(uid, SOURCE, {"acc": (value,)}) for uid, value in by_uid(values).items()]
    metrics = [{"step": 0.0, **validation_metrics(rows)}]
    config = {**template.config, "trainer.seed": seed, "made.for": name}
    return replace(
        template,
        config=config,
        manifest={**template.manifest, "recipe": "sim", "run": f"{name}-seed{seed}"},
        metrics=metrics,
        validation={0: rows},
        samples=(),
    )


def test_forty_runs_of_known_accuracy_give_the_right_tables(template):
    """Eight experiments of five seeds: every row's verdict and every pair's letters are those of the true values."""
    rng = np.random.default_rng(7)
    true = {"base": 0.60, "same": 0.60, "also": 0.60, "up": 0.70, "up2": 0.70, "top": 0.80, "down": 0.50, "low": 0.40}
    difficulty = rng.uniform(size=2000)
    groups = [
        [
            simulated(template, name, seed, answered(rng, accuracy + rng.normal(0, 0.01), 2000, difficulty))
            for seed in range(1, 6)
        ]
        for name, accuracy in true.items()
    ]
    assert sum(map(len, groups)) == 40
    tables = [block for block in comparison(groups) if isinstance(block, Table)]
    verdicts = {row[0].split(" − ")[0].removeprefix("sim/"): row[-1] for row in tables[0].rows}
    assert len(verdicts) == 7
    for name, verdict in verdicts.items():
        word = "better" if true[name] > 0.60 else "worse" if true[name] < 0.60 else "no difference was shown"
        assert verdict == f"{word} over seeds", name


# --- what is called a difference ---


def false_by_question(pairs: int, questions: int, accuracy: float, seed: int) -> tuple[int, int]:
    """Of equal policies: how many p are below 0.05, and how many paired intervals miss 0."""
    rng = np.random.default_rng(seed)
    difficulty = rng.uniform(size=questions)
    found = missed = 0
    for _ in range(pairs):
        a, b = (by_uid(answered(rng, accuracy, questions, difficulty)) for _ in range(2))
        found += question_p(a, b) < 0.05
        interval = paired_comparison(a, b).difference
        missed += not interval.low <= 0 <= interval.high
    return found, missed


def false_over_seeds(pairs: int, seeds: int, deviation: float, seed: int) -> tuple[int, int]:
    rng = np.random.default_rng(seed)
    found = missed = 0
    for _ in range(pairs):
        a, b = (list(rng.normal(0.6, deviation, seeds)) for _ in range(2))
        found += welch_p(a, b) < 0.05
        interval = welch_interval(a, b)
        missed += not interval.low <= 0 <= interval.high
    return found, missed


@pytest.mark.parametrize("accuracy", [0.6, 0.98])
def test_equal_policies_are_rarely_called_different_by_question(accuracy):
    found, missed = false_by_question(300, 200, accuracy, 1)
    assert at_most(found, 0.05, 300) and at_most(missed, 0.05, 300)


def test_equal_experiments_are_rarely_called_different_over_seeds():
    found, missed = false_over_seeds(300, 3, 0.01, 2)
    assert at_most(found, 0.05, 300) and at_most(missed, 0.05, 300)


def false_families(families: int, others: int, seed: int) -> int:
    """Families of comparisons with one baseline in which any equal experiment is called different."""
    rng = np.random.default_rng(seed)
    found = 0
    for _ in range(families):
        values = [list(rng.normal(0.6, 0.01, 3)) for _ in range(others + 1)]
        p = holm({i: welch_p(values[0], other) for i, other in enumerate(values[1:])})
        found += min(p.values()) < 0.05
    return found


def test_nine_comparisons_at_once_are_rarely_wrong_in_any():
    assert at_most(false_families(200, 9, 3), 0.05, 200)


# --- the same, in full ---
