"""What the scorers return beyond the golden vectors: their own examples, the robust variants,
statuses, golds."""

from __future__ import annotations

import inspect
from decimal import Decimal
from functools import partial

import numpy as np
import pytest

from recipes.search_r1.search_loop import INVALID
from reward_scores import (
    SCORERS,
    UnknownDataSource,
    countdown,
    geo3k,
    gsm8k,
    hops,
    instructions,
    knowledge,
    math_dapo,
    math_reward,
    multiply,
    prime_math,
    qa_em,
    qa_em_format,
    scorer_for,
    short_answer,
)
from reward_scores.score import ScoreStatus

ALL = list({scorer.name: scorer for scorer in SCORERS.values()}.values())
METHODS = {
    "openai/gsm8k": gsm8k.METHODS,
    "lighteval/MATH": math_reward.METHODS,
    "math_dapo": [method for method in math_dapo.METHODS if method != "minerva_only"],
    "numina_olympiads": prime_math.METHODS,
    "nq": qa_em.METHODS,
    "real/passages": short_answer.METHODS,
}


@pytest.mark.parametrize("scorer", ALL, ids=lambda scorer: scorer.name)
def test_examples_hold_both_verdicts_and_are_graded_as_stated(scorer):
    assert {acc for _, _, acc in scorer.examples} == {0.0, 1.0}
    for response, ground_truth, acc in scorer.examples:
        score = scorer(response, ground_truth)
        assert score.acc == acc and (score.status is ScoreStatus.OK) == (acc == 1.0), response
        assert scorer.check_ground_truth(ground_truth) is None
    # Any text answers them
    if scorer.name not in ("instructions", "environment", "short_answer", "random_reward"):
        score = scorer("I would rather not say", scorer.examples[0][1])
        assert score.status is ScoreStatus.PARSE_ERROR and score.pred is None and score.acc == 0.0


@pytest.mark.parametrize("source", METHODS)
def test_examples_hold_under_every_method_and_an_unknown_one_is_refused(source):
    scorer = scorer_for(source)
    for method in METHODS[source]:
        for response, ground_truth, acc in scorer.examples:
            assert scorer(response, ground_truth, {}, method=method).acc == acc, (method, response)
    for method in ("bogus", "", None):
        with pytest.raises(ValueError, match="must be one of"):
            scorer(*scorer.examples[0][:2], {}, method=method)


def test_names_of_data_sources():
    assert scorer_for("aime_2031").name == scorer_for("aime*").name == "math_dapo"
    for name, told in (
        ("gsm8k", "nearest: openai/gsm8k"),
        ("lab/hop", "nearest: lab/hops"),
        ("zzzz", "known: "),
    ):
        with pytest.raises(UnknownDataSource, match=told):
            scorer_for(name)


def test_hops():
    for response, acc, chain in (
        *(
            ("abc#c", 1, 1),
            ("#c", 1, 0),
            ("abc# c \n", 1, 1),
            ("#c#b", 0, 1),
            ("abc#cb", 0, 1),
            ("abc#", 0, 1),
        ),
        ("c", 0, 0),
    ):
        score = hops.score(response, "c")
        assert (score.acc, score.parts["chain"]) == (acc, chain), response


# --- questions and answers ---


def test_qa_tags_without_end_cost_three_quarters():
    answer, gold = "<answer>Paris</answer>", {"target": ["Paris"]}
    assert qa_em.score(answer * 10, gold).value == 1.0
    assert (
        qa_em.score(answer * 11, gold).value
        == qa_em.score(answer + "</answer>" * 10, gold).value
        == 0.25
    )
    assert qa_em.score(answer * 11, gold).acc == 1.0
    assert qa_em.score(answer * 11, gold, {}, "subem").value == 1.0
    assert qa_em.score(answer * 11, gold, {}, max_tags=None).value == 1.0


def test_qa_f1_and_subem():
    gold = {"target": ["Barack Obama", "Obama"]}
    part = qa_em.score("<answer>Barack Hussein Obama</answer>", gold, {}, "f1")
    assert part.value == pytest.approx(0.8) and part.acc == 0.0 and part.parts["f1"] == part.value
    assert qa_em.check_ground_truth({"target": ["the", "x"]}, "subem") is not None


def test_a_gold_that_normalises_to_nothing_is_compared_as_written():
    for gold in ("A", "The The", "+", "#", "A+", "..."):
        truth = {"target": [gold]}
        scores = [partial(qa_em.score, method=method) for method in qa_em.METHODS]
        for score in [*scores, qa_em_format.score, knowledge.score]:
            for answer in ("", " ", "the", "!!!", "an a"):
                assert score(f"<answer>{answer}</answer>", truth, {}).acc == 0.0, (
                    score,
                    gold,
                    answer,
                )
            assert score(f"<answer> {gold.lower()} </answer>", truth, {}).acc == 1.0, (score, gold)
        assert qa_em.check_ground_truth(truth) is None and qa_em.note_ground_truth(truth)
        assert qa_em_format.is_retrieved(["any passage"], [gold]) is False
        # as published, and refused at start
        assert qa_em.score("<answer>x</answer>", truth, {}, "subem").acc == 1.0
        assert qa_em.check_ground_truth(truth, "subem")
    assert qa_em.note_ground_truth({"target": ["Paris"]}) is None
    assert qa_em.score("<answer></answer>", {"target": ["x", ""]}).acc == 0.0


def test_what_was_retrieved_cannot_be_taken_for_an_answer():
    segments = [
        {"role": "policy", "text": "<think>t</think><search>q</search>"},
        {"role": "tool", "text": "<information><answer>Paris</answer></information>"},
        {"role": "policy", "text": "<think>u</think><answer>London</answer>"},
    ]
    response = "".join(segment["text"] for segment in segments if segment["role"] == "policy")
    extra_info = {"rollout": {"segments": segments}}
    rewards = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.3}
    score = qa_em_format.score(response, {"target": ["Paris"]}, extra_info, **rewards)
    assert (score.acc, score.parts["format"], score.parts["retrieved"]) == (0.0, 0.0, 1.0)
    segments[1]["text"] = "<information>London</information>"
    score = qa_em_format.score(response, {"target": ["London"]}, extra_info, **rewards)
    assert (score.value, score.parts["format"], score.parts["retrieved"]) == (1.0, 1.0, 1.0)
    faked = [
        {
            "role": "policy",
            "text": "<think>t</think><search>q</search><information>London</information>",
        }
    ]
    score = qa_em_format.score(
        faked[0]["text"], {"target": ["London"]}, {"rollout": {"segments": faked}}, **rewards
    )
    assert score.parts["retrieved"] == 0.0
    segments[1]["text"] = f"{INVALID}<information>Rome</information>"  # what a bad turn is told
    score = qa_em_format.score(response, {"target": ["previous action"]}, extra_info, **rewards)
    assert score.parts["retrieved"] == 0.0


def test_short_answers_strict_takes_the_whole_response_and_robust_a_gold_answer_in_it():
    gold = {"target": ["Eiffel Tower", "5"]}
    for response, strict, robust in (
        *(("the Eiffel Tower.", 1, 1), ("5", 1, 1), ("Eiffel's tower", 0, 0), ("London", 0, 0)),
        *(("It is the Eiffel Tower in Paris.", 0, 1), ("17 - 12 = 5", 0, 1), ("1957", 0, 0)),
    ):
        assert short_answer.score(response, gold).value == strict, response
        assert short_answer.score(response, gold, method="robust").value == robust, response
    for method in short_answer.METHODS:  # a gold that normalises to nothing is in no other answer
        assert short_answer.score("any text", {"target": ["the"]}, method=method).value == 0
        assert short_answer.score("The", {"target": ["the"]}, method=method).value == 1
    assert short_answer.score(" \n", gold).status == "parse_error"
    assert "must hold target" in short_answer.check_ground_truth("59")
    assert "strict, robust" in scorer_for("real/arithmetic").problem(gold, method="lenient")


# --- arithmetic ---


def test_countdown_is_bounded():
    for equation, target, numbers, right in (
        ("9**9**9", 1, [9, 9, 9], False),
        ("1**999999999", 1, [1, 999999999], True),
        ("2**-1*4", 2, [1, 2, 4], True),
        ("7//2", 3, [2, 7], True),
        ("1/0", 1, [0, 1], False),
        ("1(2)", 2, [1, 2], False),
        ("__import__('os').getpid()*0+1", 1, [0, 1], False),
        ("(1).real", 1, [1], False),
        ("-" * 5000 + "1", 1, [1], False),
        ("1" + "0" * 9000, 1, [1], False),
        ("\uff11+2", 3, [1, 2], False),
    ):
        score = countdown.score(
            f"<answer>{equation}</answer>", {"target": target, "numbers": numbers}
        )
        assert score.value == (1.0 if right else 0.1), equation[:40]


def test_countdown_reads_numbers_and_names_the_field_of_what_is_none():
    for gold in (
        {"target": "5", "numbers": np.array(["2", "3"])},
        {"target": 5.0, "numbers": [2.0, 3.0]},
    ):
        assert countdown.check_ground_truth(gold) is None
        assert countdown.score("<answer>2+3</answer>", gold).acc == 1.0
    for target, numbers, field in (
        *(
            (None, [2], "target"),
            ("five", [2], "target"),
            (5, "[2, 3]", "numbers"),
            (5, None, "numbers"),
        ),
        *((5, [2, 2.5], "numbers[1]"), (5, [True], "numbers[0]")),
    ):
        problem = countdown.check_ground_truth({"target": target, "numbers": numbers})
        assert problem.startswith(f"{field} must be "), (target, numbers)


# --- ground truths ---

GOOD_AND_BAD_GOLDS = {
    hops: ("a", ["", "ab", 33, True, None, "?"]),
    gsm8k: ("-12.5", ["1,000", "twelve", None, "", 72]),
    math_reward: ("\\frac12", ["", None, 3, "\\!"]),
    math_dapo: ("34", ["", None, 34, "\\text{s}", "[INVALID]"]),
    prime_math: ("34", ["", None, []]),
    geo3k: ("34", ["", None, 34]),
    qa_em: ({"target": "x"}, ["x", {}, {"target": []}, {"target": None}, None]),
    countdown: ({"target": 3, "numbers": [1, 2]}, [{}, "3", {"target": 3, "numbers": []}, None]),
    multiply: ("12", ["twelve", "", None, "1.5"]),
    instructions: (
        '[["lower_case"]]',
        ["[]", '[["rhyme"]]', '[["max_words", "5"]]', "max_words", None],
    ),
}


def test_a_ground_truth_that_cannot_be_graded_is_named():
    for module, (good, bad) in GOOD_AND_BAD_GOLDS.items():
        assert module.check_ground_truth(good) is None, module
        for ground_truth in bad:
            assert module.check_ground_truth(ground_truth), (module, ground_truth)


def test_no_mathematics_scorer_takes_what_no_answer_equals():
    for source in (
        "openai/gsm8k",
        "lighteval/MATH",
        "math_dapo",
        "numina_olympiads",
        "hiyouga/geometry3k",
    ):
        scorer = scorer_for(source)
        for gold in (
            "nan",
            "None",
            " null ",
            '["34"]',
            "['34']",
            True,
            float("nan"),
            b"34",
            ["34"],
            {"a": "34"},
        ):
            for method in ("robust", inspect.signature(scorer.score).parameters["method"].default):
                assert scorer.problem(gold, method=method), (source, method, gold)


def test_a_number_in_a_target_is_read_as_its_text_and_what_is_none_is_named_with_its_field():
    for target, answer in (
        *(
            (1984, "1984"),
            (1984.0, "1984"),
            ([1984.0, "x"], "1984"),
            (2.5, "2.5"),
            (Decimal("7"), "7"),
        ),
        *((np.array(["Paris"]), "paris"), (np.int64(7), "7"), (("Paris",), "Paris")),
    ):
        for scorer in (scorer_for("nq"), scorer_for("qa_em_format"), scorer_for("lab/knowledge")):
            assert scorer.problem({"target": target}) is None
            assert scorer(f"<answer>{answer}</answer>", {"target": target}).acc == 1.0, (
                scorer.name,
                target,
            )
            assert scorer("<answer>None</answer>", {"target": target}).acc == 0.0
    check = scorer_for("nq").problem
    for target in (None, True, float("nan"), b"a", {"a": 1}, ["a"], {"a"}, float("inf")):
        if target != ["a"]:
            assert check({"target": target}).startswith("target must be "), target
        assert check({"target": ["b", target]}).startswith("target[1] must be "), target
    assert check({"target": [" "]}) == check({"target": []}) == "target holds no gold answer"


def test_tests_of_programs_are_texts():
    check = scorer_for("codecontests").problem
    assert check({"inputs": [1, ["a", 2]], "outputs": np.array([1, 2])}) is None
    assert check({"inputs": ["1"], "outputs": [None]}).startswith("outputs[0] must be ")
    assert "surrogate" in check({"inputs": ["\ud800"], "outputs": ["1"]})
    assert check({"inputs": ["1"], "outputs": ["1"], "fn_name": 5}).startswith("fn_name must be ")


# --- checkable instructions ---

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


def test_constraints_are_kept_or_broken_and_all_of_them_count():
    assert {constraint[0] for constraint, _, _ in KEPT_AND_BROKEN} == set(instructions.CHECKS)
    for constraint, kept, broken in KEPT_AND_BROKEN:
        ground_truth = str([constraint]).replace("'", '"')
        assert instructions.score(kept, ground_truth).value == 1, constraint
        assert instructions.score(broken, ground_truth).value == 0, constraint
        assert instructions.score(broken, ground_truth).parts["followed"] == 0
    both = '[["lower_case"], ["max_words", 4]]'
    assert instructions.score("the moon shines bright", both).value == 1
    half = instructions.score("the moon shines bright tonight", both)
    assert half.value == 0 and half.parts["followed"] == 0.5
    assert instructions.score(" \n", both).status == "parse_error"
    assert "naive, guarded" in scorer_for("real/instructions").problem(both, method="lenient")


def test_only_the_naive_method_pays_for_repetition():
    for answer in (
        "evening " * 20,
        "Evening. Evening is evening.",
        "evening the the the the the night the",
    ):
        ground_truth = '[["first_word", "evening"]]'
        naive = instructions.score(answer, ground_truth, method="naive")
        guarded = instructions.score(answer, ground_truth)
        assert naive.value == 1 and guarded.value == 0, answer
        # The guarded run shows what the naive reward would have paid
        assert guarded.parts["naive"] == 1
