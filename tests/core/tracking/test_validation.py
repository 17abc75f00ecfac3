"""Validation statistics against closed forms, brute force, verl's recorded values and simulated
coverage."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tracking.validation import (
    ValRecord,
    best_at_k,
    majority,
    merge_by_question,
    question_interval,
    t_interval,
    t_quantile,
    validation_metrics,
    wilson,
)
from core.types import Prompt, ScoredGroup, Segment, Stop, Trajectory
from results.reporting.comparison import accuracy_by_question
from reward_scores.score import Score, ScoreStatus

GOLDEN = Path(__file__).parents[2] / "golden"


def record(
    uid: str, acc: list[float], preds: list[str | None] | None = None, source: str = "s", **more
) -> ValRecord:
    values = {
        "acc": tuple(map(float, acc)),
        **{name: tuple(map(float, v)) for name, v in more.items()},
    }
    return ValRecord(uid, source, values, tuple(preds or ()))


# --- quantiles and intervals against tables ---


@pytest.mark.parametrize(
    ("df", "quantile"),
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (4, 2.7764451),
        (5, 2.5705818),
        (10, 2.2281389),
    ]
    + [(30, 2.0422725), (499, 1.9647294), (20_000, 1.9599640)],
)
def test_student_quantiles_are_those_of_the_tables(df, quantile):
    assert t_quantile(df) == pytest.approx(quantile, abs=6e-8)


def test_wilson_by_hand():
    assert wilson(0.5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(1.0, 500) == pytest.approx((500 / (500 + 1.9599640**2), 1.0))


# --- one question ---


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.3]), min_size=1, max_size=7), st.data())
def test_best_of_k_is_the_mean_over_all_subsets(values, data):
    k = data.draw(st.integers(1, len(values)))
    brute = statistics.fmean(max(subset) for subset in itertools.combinations(values, k))
    assert best_at_k(values, k) == pytest.approx(brute, abs=1e-12)


def test_pass_at_k_is_the_papers_formula():
    assert best_at_k([1.0] * 3 + [0.0] * 13, 4) == pytest.approx(
        1 - math.comb(13, 4) / math.comb(16, 4)
    )
    with pytest.raises(ValueError, match="k=3.* 2 samples"):
        best_at_k([1.0, 0.0], 3)


def test_majority_follows_verl_but_silence_does_not_vote():
    golden = json.loads((GOLDEN / "bootstrap.json").read_text())
    cases = [case for case in golden["cases"] if case["name"].startswith("maj vote")]
    assert len(cases) == 2
    for case in cases:
        votes = case["inputs"]["data"]
        assert majority([v["val"] for v in votes], [v["pred"] for v in votes]) == case["expected"]
    assert majority([0.0, 0.0, 0.0, 1.0], [None, None, None, "7"]) == 1.0
    assert majority([0.2, 0.4], [None, None]) == 0.2


# --- verl's recorded values ---


def golden_records(inputs: dict) -> list[ValRecord]:
    infos = inputs["infos"]
    records: dict[str, dict[str, list]] = {}
    for i, uid in enumerate(inputs["sample_uids"]):
        row = records.setdefault(
            uid, {name: [] for name in infos} | {"source": inputs["data_sources"][i]}
        )
        for name, values in infos.items():
            row[name].append(values[i])
    return [
        record(uid, row["acc"], row.get("pred"), row["source"], reward=row["reward"])
        for uid, row in records.items()
    ]


GOLDEN_VALIDATION = json.loads((GOLDEN / "val_metrics.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDEN_VALIDATION, ids=lambda case: case["name"])
def test_means_and_spreads_are_verls(case):
    ours = validation_metrics(golden_records(case["inputs"]))
    checked = 0
    for source, variables in case["expected"].items():
        for variable, expected in variables.items():
            for name, value in expected.items():
                if name.startswith(("mean@", "std@")):
                    core = "core" if variable == "acc" and name.startswith("mean@") else "aux"
                    assert ours[f"val-{core}/{source}/{variable}/{name}"] == pytest.approx(
                        value, abs=1e-12
                    ), name
                    checked += 1
    assert checked >= 2


# --- intervals over questions ---


def test_one_sample_a_question_is_wilsons_own():
    estimate = question_interval([1.0] * 30 + [0.0] * 20)
    assert (estimate.low, estimate.high) == pytest.approx(wilson(0.6, 50))
    assert estimate.n == 50


def test_samples_that_agree_count_once():
    """Four copies of every answer say no more than one: the width is that of the questions."""
    once = question_interval([1.0] * 30 + [0.0] * 20)
    copied = validation_metrics([record(str(i), [float(i < 30)] * 4) for i in range(50)])
    low, high = (copied[f"val-aux/s/acc/mean@4/ci_{side}"] for side in ("low", "high"))
    assert (low, high) == pytest.approx((once.low, once.high))


def test_all_right_still_has_a_width():
    estimate = question_interval([1.0] * 500, draws=4)
    assert estimate.high == 1.0 and estimate.low == pytest.approx(wilson(1.0, 500)[0])
    assert question_interval([1.0]).low is None


def test_the_interval_covers():
    """With 4 samples of questions of unequal difficulty; an interval over samples does not."""
    generator, n, questions, repeats, covered, naive = np.random.default_rng(0), 4, 100, 300, 0, 0
    for _ in range(repeats):
        shares = generator.binomial(n, generator.beta(0.3, 0.3, questions)) / n
        estimate = question_interval(shares.tolist(), n)
        covered += estimate.low <= 0.5 <= estimate.high
        low, high = wilson(shares.mean(), questions * n)
        naive += low <= 0.5 <= high
    assert covered / repeats >= 0.925 and naive / repeats < 0.85


# --- names and records ---


def test_names_of_several_samples_and_sources():
    records = [
        record("a", [1, 0, 0, 0], ["1", "2", "2", "2"], "openai/gsm8k", reward=[1, -1, -1, -1]),
        record("b", [1, 1, 0, 1], ["1", "1", None, "1"], "openai/gsm8k", reward=[1, 1, -1, 1]),
        record("a", [0, 0], ["1", "2"], "math"),
        record("b", [0, 1], ["1", "2"], "math"),
    ]
    names = validation_metrics(records)
    assert names["val-core/openai/gsm8k/acc/mean@4"] == 0.5
    assert names["val-core/openai/gsm8k/acc/pass@4"] == 1.0
    assert names["val-core/openai/gsm8k/acc/maj@4"] == 0.5
    assert names["val-aux/openai/gsm8k/acc/pass@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert names["val-aux/openai/gsm8k/reward/best@2/mean"] == pytest.approx((0.0 + 1.0) / 2)
    assert names["val-aux/openai/gsm8k/reward/best@4/mean"] == 1.0
    assert names["val-core/math/acc/pass@2"] == 0.5
    assert names["val-aux/math/num_samples"] == 4
    assert not any(name.startswith("val-core") and "/acc/" not in name for name in names)


def test_graded_scores_get_best_and_students_interval():
    names = validation_metrics([record(str(i), [0.2 * (i % 3), 0.5]) for i in range(10)])
    assert "val-aux/s/acc/pass@2" not in names and "val-core/s/acc/best@2/mean" in names
    expected = t_interval([(0.2 * (i % 3) + 0.5) / 2 for i in range(10)])
    assert names["val-aux/s/acc/mean@2/ci_low"] == pytest.approx(expected.low)


def test_repeated_rows_are_one_question():
    rows = [
        record("aime-1", [1]),
        record("aime-2", [0]),
        record("aime-1", [0]),
        record("aime-2", [0]),
    ]
    names = validation_metrics(rows)
    assert names["val-core/s/acc/mean@2"] == 0.25
    assert names["val-aux/s/num_questions"] == 2
    assert merge_by_question(rows)["s"][0].values["acc"] == (1.0, 0.0)
    assert accuracy_by_question(rows) == {"s": {"aime-1": 0.5, "aime-2": 0.0}}


def test_a_record_of_a_scored_group():
    def trajectory(length: int, stop: Stop) -> Trajectory:
        ids, mask = np.arange(length), np.array([True] * (length - 1) + [False])
        return Trajectory([1], ids, mask, np.zeros(length), (Segment("policy", "x"),), stop, 0, 0)

    prompt = Prompt(0, "u", (1,), (), "7", "openai/gsm8k")
    scores = (
        Score(1.0, {"format": 1.0, "score": 1.0}, pred="7"),
        Score(0.0, {"score": 0.0}, ScoreStatus.PARSE_ERROR),
    )
    group = ScoredGroup(prompt, (trajectory(3, Stop.EOS), trajectory(5, Stop.LENGTH)), scores)
    made = ValRecord.of(group)
    assert made.values["acc"] == (1.0, 0.0) and made.values["reward"] == (1.0, 0.0)
    assert made.values["format"] == (1.0, 0.0) and "score" not in made.values
    assert made.values["response_length"] == (2.0, 4.0) and made.values["truncated"] == (0.0, 1.0)
    assert made.values["parse_error"] == (0.0, 1.0) and made.preds == ("7", None)
    assert ValRecord.from_json(json.loads(json.dumps(made.to_json()))) == made
    names = validation_metrics([made])
    assert names["val-aux/openai/gsm8k/response_length/mean@2"] == 3.0
    assert names["val-aux/openai/gsm8k/parse_error/mean@2"] == 0.5


def test_a_record_needs_equally_many_samples():
    for values in ({"acc": (1.0, 0.0), "reward": (1.0,)}, {"reward": (1.0,)}):
        with pytest.raises(ValueError, match="'u'.*acc"):
            ValRecord("u", "s", values)


def test_scores_outside_of_0_to_1_are_marked():
    def metrics(*values):
        return validation_metrics([ValRecord("q", "s", {"acc": values})])

    assert (
        metrics(1.0, -1.0)["val-aux/s/acc/min"] == -1.0
        and metrics(0.0, 1.5)["val-aux/s/acc/max"] == 1.5
    )
    assert not [name for name in metrics(0.0, 1.0) if name.endswith(("/min", "/max"))]
