"""Short answers without tags: the whole response counts, and the lenient reading takes whole words alone."""

from __future__ import annotations

import pytest

from reward_scores import scorer_for
from reward_scores.short_answer import check_ground_truth, score

GOLD = {"target": ["Eiffel Tower", "5"]}


@pytest.mark.parametrize(
    ("response", "strict", "robust"),
    [
        ("the Eiffel Tower.", 1, 1),
        ("5", 1, 1),
        ("It is the Eiffel Tower in Paris.", 0, 1),
        ("17 - 12 = 5", 0, 1),
        ("1957", 0, 0),  # holds the gold answer's digits and not its word
        ("Eiffel's tower", 0, 0),
        ("London", 0, 0),
    ],
)
def test_strict_takes_the_whole_response_and_robust_a_gold_answer_in_it(response, strict, robust):
    assert score(response, GOLD).value == strict
    assert score(response, GOLD, method="robust").value == robust


@pytest.mark.parametrize("method", ["strict", "robust"])
def test_a_gold_answer_that_normalises_to_nothing_is_in_no_other_answer(method):
    assert score("any text", {"target": ["the"]}, method=method).value == 0
    assert score("The", {"target": ["the"]}, method=method).value == 1


def test_an_empty_answer_is_no_answer():
    assert score(" \n", GOLD).status == "parse_error"


def test_bad_ground_truths_and_methods_are_problems():
    assert "must hold target" in check_ground_truth("59")
    assert "strict, robust" in scorer_for("real/arithmetic").problem(GOLD, method="lenient")
    with pytest.raises(ValueError, match="must be one of"):
        score("5", GOLD, method="em")
