"""What a task can tell apart: the score is a share of pairs, and a failed control leaves no verdict."""

from __future__ import annotations

import random

import pytest

from recipes.lab import discrimination, planted_run
from recipes.lab.discrimination import Comparison, auc, rank_p, score_of, verdict

SEEDS, ROOT = (8, 8), discrimination.ROOT
CALIBRATED = ("lab/study_tallies", "lab/study_trails", "dapo/study_claims", "search_r1/study_conflicts")


def found(**changed: tuple[float | None, float | None]) -> list[Comparison]:
    values = {"negative": (0.55, 0.7), "positive": (1.0, 0.001), "bug": (0.95, 0.001), **changed}
    return [Comparison(name, name, "a", "b", SEEDS, *value) for name, value in values.items()]


def test_auc_is_the_share_of_pairs():
    assert auc([3, 4], [1, 2]) == 1 and auc([1, 2], [3, 4]) == 0
    assert auc([1, 3], [2, 3]) == pytest.approx((0 + 0 + 1 + 0.5) / 4)


def test_p_is_exact():
    assert rank_p([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert rank_p([1, 3, 5, 7], [2, 4, 6, 8]) == pytest.approx(48 / 70)  # counted by hand: ranks sum to 16 or 20
    assert rank_p([1, 1, 1], [1, 1, 1]) == 1


def test_equal_sides_are_rarely_told_apart():
    rng = random.Random(1)
    ps = [rank_p([rng.random() for _ in range(5)], [rng.random() for _ in range(5)]) for _ in range(200)]
    assert 0.01 < sum(p < 0.05 for p in ps) / 200 < 0.09


@pytest.mark.parametrize(
    ("changed", "baseline", "says"),
    [
        ({}, 0.6, "carries claims: its score is 0.95"),
        ({"bug": (0.85, 0.02)}, 0.6, "no claim: its score 0.85 is below 0.9 (bug)"),
        ({"bug": (None, None)}, 0.6, "no claim: not run (bug)"),
        ({"negative": (0.9, 0.01)}, 0.6, "no claim: the negative control fails"),
        ({"positive": (0.7, 0.2)}, 0.6, "no claim: the positive control fails"),
        ({}, 0.9, "no claim: the baseline ends at 90%"),
    ],
)
def test_a_task_carries_claims_only_where_controls_hold(changed, baseline, says):
    assert says in verdict(found(**changed), [baseline] * 8)


def test_a_control_that_the_study_does_not_confirm_leaves_no_claim():
    assert "no claim: by its registered margin the control negative did not hold" in verdict(
        found(), [0.6] * 8, ["negative"]
    )


def test_the_score_is_the_least_auc_and_leaves_the_negative_control_out():
    assert score_of(found(negative=(0.1, 0.5))) == 0.95
    assert score_of(found(bug=(None, None))) is None


def test_registered_studies_have_the_controls_that_the_table_reads():
    for name in CALIBRATED:
        study = discrimination.load_study(ROOT / "recipes" / f"{name}.yaml")
        assert {discrimination.NEGATIVE, discrimination.POSITIVE} <= set(study.claims)
        assert discrimination.BASELINE in study.arms and discrimination.METRIC in study.metrics
        assert study.minimum_seeds == len(study.seeds) >= 8
        assert study.claims[discrimination.NEGATIVE].direction == "equal"
        compared = discrimination.about_the_task(study)
        others = [claim for name, claim in compared.items() if name != discrimination.NEGATIVE]
        assert {claim.direction for claim in others} == {"greater"} and len(others) >= 3


def test_a_study_of_algorithms_is_no_task():
    """Claims that two end alike say nothing of what a task can tell apart."""
    study = discrimination.load_study(ROOT / "recipes/lab/study_variants.yaml")
    assert len(study.claims) > 10
    assert discrimination.about_the_task(study).keys() == {discrimination.NEGATIVE, discrimination.POSITIVE}


def test_a_planted_run_is_the_same_run_with_a_bug():
    typed = ["family=trails", "plant=kl_sign", "seed_offset=100", "trainer.seed=2"]
    recipe, arguments, bug = planted_run.settings(typed)
    assert recipe == "grpo" and bug == "kl_sign" and "trainer.seed=102" in arguments
    assert "actor_rollout_ref.model.path=./outputs/lab/trails/base/seed-2/current" in arguments
    typed = ["recipe=dapo", "family=trails", "trainer.seed=2", "data.val_files=x"]
    recipe, arguments, bug = planted_run.settings(typed)
    assert recipe == "dapo" and bug is None and arguments.count("data.val_files=x") == 1
