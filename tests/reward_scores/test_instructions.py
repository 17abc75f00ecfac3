"""Checkable instructions: each kind of constraint is kept and broken, and repetition is no text."""

from __future__ import annotations

import json

import pytest

from reward_scores import scorer_for
from reward_scores.instructions import CHECKS, check_ground_truth, score

KEPT_AND_BROKEN = [
    (["lower_case"], "the moon is old.", "The moon is old."),
    (["upper_case"], "THE MOON IS 4 BILLION YEARS OLD.", "THE MOON is old."),
    (["first_word", "evening"], '"Evening, all is calm."', "An evening is calm."),
    (["last_word", "ribbon"], "She wore a red ribbon!", "Her ribbon was red."),
    (["word_times", "tea", 2], "Tea for two, and more tea for me.", "Tea for two and teapots."),
    (["max_words", 5], "It's a well-known old song.", "It is a well known old song."),
    (["sentences", 2], "It rains. We stay in!", "It rains, at 3.5 degrees."),
    (["list_items", 2], "- warm bread\n- cold milk", "1. warm bread\n2. cold milk"),
    (["in_quotes"], '"Bread is warm today."', '"Bread" is warm today.'),
    (["without", ","], "Bread is warm and good.", "Bread is warm, and good."),
    (["in_order", "salt", "sugar"], "First salt and then sugar.", "First sugar and then salt."),
]


def test_every_kind_has_a_case():
    assert {constraint[0] for constraint, _, _ in KEPT_AND_BROKEN} == set(CHECKS)


@pytest.mark.parametrize(("constraint", "kept", "broken"), KEPT_AND_BROKEN, ids=lambda value: str(value)[:20])
def test_a_constraint_is_kept_or_broken(constraint, kept, broken):
    ground_truth = json.dumps([constraint])
    assert score(kept, ground_truth).value == 1
    assert score(broken, ground_truth).value == 0
    assert score(broken, ground_truth).parts["followed"] == 0


def test_all_constraints_count():
    both = '[["lower_case"], ["max_words", 4]]'
    assert score("the moon shines bright", both).value == 1
    half = score("the moon shines bright tonight", both)
    assert half.value == 0 and half.parts["followed"] == 0.5


@pytest.mark.parametrize(
    "answer", ["evening " * 20, "Evening. Evening is evening.", "evening the the the the the night the"]
)
def test_only_the_naive_method_pays_for_repetition(answer):
    ground_truth = '[["first_word", "evening"]]'
    naive, guarded = score(answer, ground_truth, method="naive"), score(answer, ground_truth)
    assert naive.value == 1 and guarded.value == 0
    assert guarded.parts["naive"] == 1  # the guarded run shows what the naive reward would have paid


def test_an_empty_answer_is_no_answer():
    assert score(" \n", '[["lower_case"]]').status == "parse_error"


@pytest.mark.parametrize(
    ("ground_truth", "problem"),
    [
        ("[]", "at least one constraint"),
        ('[["rhyme"]]', "unknown kind 'rhyme'"),
        ('[["max_words", "5"]]', "takes: int"),
        ("max_words", "an example"),
        (None, "an example"),
    ],
)
def test_a_ground_truth_that_cannot_be_checked_is_a_problem_before_the_start(ground_truth, problem):
    assert problem in check_ground_truth(ground_truth)


def test_an_unknown_method_is_a_problem():
    assert "naive, guarded" in scorer_for("real/instructions").problem('[["lower_case"]]', method="lenient")
