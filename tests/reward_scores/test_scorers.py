"""What the scorers say beyond the golden vectors: their own examples, the robust variants, statuses, ground truths."""

from __future__ import annotations

import inspect
from decimal import Decimal
from functools import partial

import numpy as np
import pytest

from reward_scores import (
    SCORERS,
    UnknownDataSource,
    countdown,
    geo3k,
    gsm8k,
    hops,
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
from reward_scores.arithmetic import CannotEvaluate, evaluate
from reward_scores.equivalence import equivalent
from reward_scores.expressions import same_value
from reward_scores.score import Scorer, ScoreStatus

ALL = list({scorer.name: scorer for scorer in SCORERS.values()}.values())
VARIANTS = [
    (scorer, {"method": method})
    for scorer, methods in (
        (scorer_for("openai/gsm8k"), gsm8k.METHODS),
        (scorer_for("lighteval/MATH"), math_reward.METHODS),
        (scorer_for("math_dapo"), [method for method in math_dapo.METHODS if method != "minerva_only"]),
        (scorer_for("numina_olympiads"), prime_math.METHODS),
        (scorer_for("nq"), qa_em.METHODS),
        (scorer_for("real/passages"), short_answer.METHODS),
    )
    for method in methods
]


@pytest.mark.parametrize("scorer", ALL, ids=lambda scorer: scorer.name)
def test_examples_hold_both_verdicts_and_are_graded_as_stated(scorer):
    assert {acc for _, _, acc in scorer.examples} == {0.0, 1.0}
    for response, ground_truth, acc in scorer.examples:
        score = scorer(response, ground_truth)
        assert score.acc == acc, response
        assert (score.status is ScoreStatus.OK) == (acc == 1.0), response
        assert scorer.check_ground_truth(ground_truth) is None


@pytest.mark.parametrize(("scorer", "options"), VARIANTS, ids=lambda item: getattr(item, "name", str(item)))
def test_examples_hold_under_every_variant(scorer, options):
    for response, ground_truth, acc in scorer.examples:
        assert scorer(response, ground_truth, {}, **options).acc == acc, response


def test_every_scorer_reports_an_answer_that_is_not_there():
    for scorer in ALL:
        if scorer.name in ("instructions", "environment", "short_answer", "random_reward"):
            continue  # any text is an answer to them
        score = scorer("I would rather not say", scorer.examples[0][1])
        assert score.status is ScoreStatus.PARSE_ERROR and score.pred is None and score.acc == 0.0, scorer.name


def test_names_of_data_sources():
    assert scorer_for("aime_2031").name == "math_dapo"
    with pytest.raises(UnknownDataSource, match="nearest: openai/gsm8k"):
        scorer_for("gsm8k")
    with pytest.raises(UnknownDataSource, match="nearest: lab/hops"):
        scorer_for("lab/hop")
    with pytest.raises(UnknownDataSource, match="known: .*openai/gsm8k"):
        scorer_for("zzzz")
    for name in ("", "aim", "aime*"):
        if name == "aime*":
            assert scorer_for(name).name == "math_dapo"
        else:
            with pytest.raises(UnknownDataSource):
                scorer_for(name)


@pytest.mark.parametrize("method", ["bogus", "", None])
def test_an_unknown_method_is_refused(method):
    for module in (gsm8k, math_reward, math_dapo, prime_math, qa_em):
        with pytest.raises(ValueError, match="must be one of"):
            module.score("x", {"target": ["x"]} if module is qa_em else "1", {}, method=method)


@pytest.mark.parametrize(
    ("response", "acc", "chain"),
    [("abc#c", 1, 1), ("#c", 1, 0), ("abc# c \n", 1, 1), ("#c#b", 0, 1), ("abc#cb", 0, 1), ("abc#", 0, 1), ("c", 0, 0)],
)
def test_hops(response, acc, chain):
    score = hops.score(response, "c")
    assert (score.acc, score.parts["chain"]) == (acc, chain)


ROBUST_GSM8K = [
    ("#### 72.", "72"),
    ("#### $72", "72"),
    ("#### **72**", "72"),
    ("####72", "72"),
    ("#### 72.0", "72"),
    ("#### 072", "72"),
    ("#### +72", "72"),
    ("#### \u22125", "-5"),
    ("#### - 5", "-5"),
    ("#### -$5", "-5"),
    ("#### \uff17\uff12", "72"),
    ("#### \\boxed{72}", "72"),
    ("#### 1,234", "1,234"),
    ("#### 1,234.50 dollars", "1234.5"),
    ("#### 72" + " " * 400, 72),
    ("It is 1,234.", "1234"),
    ("that is 7 - 2 = 5", "5"),
    ("#### .5", "0.5"),
    ("#### -0", "0"),
    ("#### 10 20", "10"),
]


@pytest.mark.parametrize(("response", "gold"), ROBUST_GSM8K)
def test_gsm8k_robust_reads_what_a_reader_would(response, gold):
    assert gsm8k.score(response, gold, {}, "robust").acc == 1.0
    assert gsm8k.check_ground_truth(gold, "robust") is None


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("#### 7", "72"),
        ("#### 72\n#### 1", "72"),
        ("#### -72", "72"),
        ("#### 7.2", "72"),
        ("#### none of 72", "7"),
        ("#### 10 20", "20"),
    ],
)
def test_gsm8k_robust_is_not_generous(response, gold):
    assert gsm8k.score(response, gold, {}, "robust").acc == 0.0


def test_gsm8k_values_of_format_and_correctness():
    options = {"format_score": 0.1, "correct_score": 2.0}
    right, wrong, none = (gsm8k.score(text, "72", {}, **options) for text in ("#### 72", "#### 7", "72"))
    assert (right.value, right.acc) == (2.0, 1.0)
    assert (wrong.value, wrong.acc, wrong.status) == (0.1, 0.0, ScoreStatus.WRONG)
    assert (none.value, none.acc, none.status) == (0.0, 0.0, ScoreStatus.PARSE_ERROR)


SAME = [
    ("1,000", "1000"),
    ("34\\%", "34"),
    ("34.", "34"),
    ("\\frac{2}{4}", "\\frac12"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("1+x", "x+1"),
    ("\\text{even}", "Even"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("x=5", "5"),
    ("5\\text{ cm}", "5"),
    ("5\\mbox{ cm}^2", "5"),
    ("-\\frac34", "\\frac{-3}{4}"),
    ("2\\frac12", "2.5"),
    ("\u22125", "-5"),
    ("\\sqrt[3]{8}", "2"),
    ("(x+1)(x-1)", "x^2-1"),
    ("90^\\circ", "90"),
    ("\\left[0,\\frac{1}{2}\\right)", "[0, 0.5)"),
    ("10^{10}", "10000000000"),
    ("\\pi r^2", "r^2\\pi"),
    ("$12$", "\\$12"),
    ("2, 1", "1, 2"),
    ("5!", "120"),
]
DIFFERENT = [
    ("", ""),
    ("\\$", "\\$"),
    ("(2,1)", "(1,2)"),
    ("[0,1)", "[0,1]"),
    ("1,2", "12"),
    ("1, 2", "12"),
    ("0.01", "1"),
    ("yes", "sey"),
    ("\\sqrt{x^2}", "x"),
    ("\\pi", "3.14159"),
    ("9^{9^{9^9}}", "1"),
    ("\\cos 13^\\circ", "13"),
    ("\\log x", "\\ln x"),
    ("\\lim 3", "3"),
    ("(1," * 400 + "2" + ")" * 400, "(1," * 400 + "3" + ")" * 400),
    ("2\\frac{1}{2}", "1"),
    ("3\\text{ or }5", "3"),
    ("1/0", "1/0+1"),
    ("((((((1,2),1),1),1),1),1),1", "((((((1,3),1),1),1),1),1),1"),
    ("x^2", "x^3"),
    ("x+y", "x-y"),
    ("1,2,2", "1,1,2"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equivalent(one, other):
    assert equivalent(one, other) and equivalent(other, one)
    assert math_reward.score(f"so \\boxed{{{one}}}", other, {}, "robust").acc == 1.0
    assert math_dapo.score(f"**Answer:** {one}", other, {}, "robust").acc == 1.0
    assert prime_math.score(f"so \\boxed{{{one}}}", other, {}, "robust").acc == 1.0


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_not_equivalent(one, other):
    assert not equivalent(one, other) and not equivalent(other, one)
    assert math_reward.score(f"so \\boxed{{{one}}}", other, {}, "robust").acc == 0.0


def test_math_drops_a_short_name_in_front_only():
    assert math_reward.score("\\boxed{ab=5}", "5").acc == 1.0
    assert math_reward.score("\\boxed{abc=5}", "5").acc == 0.0


def test_prime_compares_formulas_of_two_letters_at_most():
    assert prime_math.score("\\boxed{b+a}", "a+b").acc == 1.0
    assert prime_math.score("\\boxed{c+b+a}", "a+b+c").acc == 0.0


def test_qa_tags_without_end_cost_three_quarters():
    answer, gold = "<answer>Paris</answer>", {"target": ["Paris"]}
    assert qa_em.score(answer * 10, gold).value == 1.0
    assert qa_em.score(answer * 11, gold).value == 0.25
    assert qa_em.score(answer + "</answer>" * 10, gold).value == 0.25
    assert qa_em.score(answer * 11, gold).acc == 1.0
    assert qa_em.score(answer * 11, gold, {}, "subem").value == 1.0
    assert qa_em.score(answer * 11, gold, {}, max_tags=None).value == 1.0


def test_math_robust_takes_the_last_closed_box():
    assert math_reward.score("\\boxed{42} and \\boxed{7", "42", {}, "robust").acc == 1.0
    assert math_reward.score("\\boxed{42}, not \\fbox{7}", "42", {}, "robust").acc == 1.0
    assert math_reward.score("\\boxed 5, no: \\boxed{42}", "42", {}, "robust").acc == 1.0
    assert math_reward.score("\\boxed{42} \\boxed{}", "42", {}, "robust").acc == 1.0
    assert math_reward.score("\\boxed{42} and \\boxed{7}", "42", {}, "robust").acc == 0.0
    assert math_reward.score("\\boxed{42} and \\boxed{7}", "7, 42", {}, "robust").acc == 1.0
    assert math_reward.score("\\boxed 42 apples", "42", {}, "robust").acc == 1.0


@pytest.mark.parametrize(
    "response",
    ["**Answer:** 34", "**Answer: 34**", "Answer: 34.", "Answer: 34\\%", "Answer\uff1a34", "so \\boxed{ 34 }"],
)
def test_math_dapo_robust_reads_what_the_published_one_misjudges(response):
    assert math_dapo.score(response, "34").value == -1.0
    assert math_dapo.score(response, "34", {}, "robust").value == 1.0


def test_a_missing_answer_is_not_the_gold_invalid():
    assert math_dapo.check_ground_truth("[INVALID]") is not None
    assert math_dapo.score("nothing", "[INVALID]", {}, "robust").value == -1.0


def test_prime_robust_drops_the_generosity():
    for response, gold in (("\\boxed{0.01}", "1"), ("\\boxed{1,2}", "12"), ("\\boxed{6.28}", "2\\pi")):
        assert prime_math.score(response, gold).acc == 1.0
        assert prime_math.score(response, gold, {}, "robust").acc == 0.0


def test_qa_f1_and_robust():
    gold = {"target": ["Barack Obama", "Obama"]}
    part = qa_em.score("<answer>Barack Hussein Obama</answer>", gold, {}, "f1")
    assert part.value == pytest.approx(0.8) and part.acc == 0.0 and part.parts["f1"] == part.value
    assert qa_em.score("<answer>the Obama</answer>", gold, {}, "f1").value == 1.0
    assert qa_em.score("<answer>x</answer>", {"target": ["the"]}, {}, "subem").value == 1.0
    assert qa_em.check_ground_truth({"target": ["the", "x"]}, "subem") is not None
    assert qa_em.check_ground_truth({"target": ["the", "x"]}, "em") is None


@pytest.mark.parametrize("gold", ["A", "The The", "+", "#", "A+", "..."])
def test_a_gold_that_normalises_to_nothing_is_compared_as_written(gold):
    truth = {"target": [gold]}
    scores = [partial(qa_em.score, method=method) for method in qa_em.METHODS] + [qa_em_format.score, knowledge.score]
    for score in scores:
        for answer in ("", " ", "the", "!!!", "an a"):
            assert score(f"<answer>{answer}</answer>", truth, {}).acc == 0.0, (score, answer)
        assert score(f"<answer> {gold.lower()} </answer>", truth, {}).acc == 1.0, score
    assert qa_em.check_ground_truth(truth) is None and "compared as it is written" in qa_em.note_ground_truth(truth)
    assert qa_em.note_ground_truth({"target": ["Paris"]}) is None
    assert qa_em_format.is_retrieved(["any passage"], [gold]) is False
    assert qa_em.score("<answer></answer>", {"target": ["x", ""]}).acc == 0.0
    # as published, and refused at start
    assert qa_em.score("<answer>x</answer>", truth, {}, "subem").acc == 1.0
    assert qa_em.check_ground_truth(truth, "subem")


def test_nothing_is_left_of_two_units():
    assert prime_math.score("\\boxed{inch}", "cm").acc == 0.0 and prime_math.score("\\boxed{cm}", "cm").acc == 1.0
    assert prime_math.score("\\boxed{}", "degree").acc == 0.0


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
    faked = [{"role": "policy", "text": "<think>t</think><search>q</search><information>London</information>"}]
    score = qa_em_format.score(faked[0]["text"], {"target": ["London"]}, {"rollout": {"segments": faked}}, **rewards)
    assert score.parts["retrieved"] == 0.0


@pytest.mark.parametrize(
    ("equation", "target", "numbers", "right"),
    [
        ("9**9**9", 1, [9, 9, 9], False),
        ("9**9**9**9", 1, [9, 9, 9, 9], False),
        ("1**999999999", 1, [1, 999999999], True),
        ("2**-1*4", 2, [1, 2, 4], True),
        ("7//2", 3, [2, 7], True),
        ("(((((1)))))+1", 2, [1, 1], True),
        ("1/0", 1, [0, 1], False),
        ("1(2)", 2, [1, 2], False),
        ("()", 0, [], False),
        ("-" * 5000 + "1", 1, [1], False),
        ("(" * 5000 + "1" + ")" * 5000, 1, [1], False),
        ("1" + "0" * 9000, 1, [1], False),
        ("\uff11+2", 3, [1, 2], False),
    ],
)
def test_countdown_is_bounded(equation, target, numbers, right):
    score = countdown.score(f"<answer>{equation}</answer>", {"target": target, "numbers": numbers})
    assert score.value == (1.0 if right else 0.1)


def test_arithmetic_is_not_code():
    for text in (
        "__import__('os')",
        "x",
        "[1]",
        "1 if 1 else 2",
        "'a'*3",
        "1<<9",
        "1,2",
        "lambda: 1",
        "True",
        "(1).real",
    ):
        with pytest.raises(CannotEvaluate):
            evaluate(text)
    assert evaluate("2*3.5-1") == 6.0


def test_expressions():
    assert same_value("2x(x+1)", "2x^2 + 2 x")
    assert same_value("-x^2", "-(x^2)") and not same_value("-x^2", "(-x)^2")
    assert same_value("2^3^2", "512") and same_value("2^-1", "0.5") and same_value("1/2x", "x/2")
    assert same_value("sqrt(9/4)", "1.5") and same_value("1e3", "1000")
    for broken in ("", "1+", "(1", "1)", "2**", "import", "!", "9^9^9^9", "1e99999", "10!!!", "x" * 600, "(" * 300):
        assert not same_value(broken, broken), broken


GOOD_AND_BAD_GOLDS = [
    (hops, "a", ["", "ab", 33, True, None, "?"]),
    (gsm8k, "-12.5", ["1,000", "twelve", None, "", 72]),
    (math_reward, "\\frac12", ["", None, 3, "\\!"]),
    (math_dapo, "34", ["", None, 34, "\\text{s}", "[INVALID]"]),
    (prime_math, "34", ["", None, []]),
    (geo3k, "34", ["", None, 34]),
    (qa_em, {"target": "x"}, ["x", {}, {"target": []}, {"target": None}, None]),
    (countdown, {"target": 3, "numbers": [1, 2]}, [{}, "3", {"target": 3, "numbers": []}, None]),
    (multiply, "12", ["twelve", "", None, "1.5"]),
]


@pytest.mark.parametrize(("module", "good", "bad"), GOOD_AND_BAD_GOLDS, ids=lambda item: getattr(item, "__name__", ""))
def test_a_ground_truth_that_cannot_be_graded_is_named(module, good, bad):
    assert module.check_ground_truth(good) is None
    for ground_truth in bad:
        assert module.check_ground_truth(ground_truth), ground_truth


@pytest.mark.parametrize("space", [" ", "\u3000", "\x1c", "\x1f"])
def test_any_space_around_a_number_of_a_ground_truth_is_none_of_it(space):
    assert multiply.check_ground_truth(gold := f"{space}7{space}") is None
    assert multiply.score("<answer>7</answer>", gold).value == 1
    gold = {"target": gold, "numbers": [f"3{space}", 4]}
    assert countdown.check_ground_truth(gold) is None
    assert countdown.score("Assistant: <answer>3 + 4</answer>", gold).value == 1


@pytest.mark.parametrize("gold", [4, 4.0])
@pytest.mark.parametrize(
    "source, method, response, right",
    [
        ("lighteval/MATH", "published", "\\boxed{4}", 0.0),  # as published: a number equals no text
        ("lighteval/MATH", "robust", "\\boxed{4}", 1.0),
        ("lighteval/MATH", "math_verify", "\\boxed{4}", 1.0),
        ("math", "fallback", "Answer: 4", 1.0),
        ("math", "strict_box", "\\boxed{4}", 1.0),
        ("math_dapo", "robust", "Answer: 4", 1.0),
        ("hiyouga/geometry3k", "published", "<think>a</think> \\boxed{4}", 1.0),
    ],
)
def test_a_number_as_ground_truth_is_text_and_no_error(gold, source, method, response, right):
    scorer = scorer_for(source)
    assert scorer(response, gold, {}, method=method).acc == right
    assert scorer(response.replace("4", "5"), gold, {}, method=method).acc == 0.0
    # The published rules compare texts: a run under them refuses a number at its start, by name
    assert (scorer.check_ground_truth(gold, method=method) is None) == (method in ("robust", "math_verify"))
    assert scorer.check_ground_truth(True, method=method) and scorer.check_ground_truth(None, method=method)


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        (1984, "1984"),
        (1984.0, "1984"),
        ([1984.0, "x"], "1984"),
        (2.5, "2.5"),
        (Decimal("7"), "7"),
        (np.array(["Paris"]), "paris"),
        (np.int64(7), "7"),
        (("Paris",), "Paris"),
    ],
)
def test_a_number_in_a_target_is_read_as_its_text(target, answer):
    for scorer in (scorer_for("nq"), scorer_for("qa_em_format"), scorer_for("lab/knowledge")):
        assert scorer.problem({"target": target}) is None
        assert scorer(f"<answer>{answer}</answer>", {"target": target}).acc == 1.0
        assert scorer("<answer>None</answer>", {"target": target}).acc == 0.0


@pytest.mark.parametrize("target", [None, True, float("nan"), b"a", {"a": 1}, ["a"], {"a"}, float("inf")])
def test_what_is_no_text_in_a_target_is_named_with_its_field(target):
    check = scorer_for("nq").problem
    if target != ["a"]:
        assert check({"target": target}).startswith("target must be a text or a number, got ")
    assert check({"target": ["b", target]}).startswith("target[1] must be a text or a number, got ")
    assert check({"target": [" "]}) == check({"target": []}) == "target holds no gold answer"


def test_countdown_reads_numbers_and_names_the_field_of_what_is_none():
    gold = {"target": "5", "numbers": np.array(["2", "3"])}
    assert countdown.check_ground_truth(gold) is None
    assert countdown.score("<answer>2+3</answer>", gold).acc == 1.0
    assert countdown.score("<answer>2+3</answer>", {"target": 5.0, "numbers": [2.0, 3.0]}).acc == 1.0
    for wrong, field in (
        ({"target": None, "numbers": [2]}, "target must be a number, got None"),
        ({"target": "five", "numbers": [2]}, "target must be a number, got 'five'"),
        ({"target": 5, "numbers": "[2, 3]"}, "numbers must be a list of whole numbers, got '[2, 3]'"),
        ({"target": 5, "numbers": None}, "numbers must be a list of whole numbers, got None"),
        ({"target": 5, "numbers": [2, None]}, "numbers[1] must be a whole number that is not negative, got None"),
        ({"target": 5, "numbers": [2, 2.5]}, "numbers[1] must be a whole number that is not negative, got 2.5"),
        ({"target": 5, "numbers": [True]}, "numbers[0] must be a whole number that is not negative, got True"),
    ):
        assert countdown.check_ground_truth(wrong) == field


@pytest.mark.parametrize(
    "gold", ["nan", "None", " null ", '["34"]', "['34']", True, float("nan"), b"34", ["34"], {"a": "34"}]
)
def test_no_mathematics_scorer_takes_what_no_answer_equals(gold):
    for source in ("openai/gsm8k", "lighteval/MATH", "math_dapo", "numina_olympiads", "hiyouga/geometry3k"):
        scorer = scorer_for(source)
        for method in ("robust", inspect.signature(scorer.score).parameters["method"].default):
            assert scorer.problem(gold, method=method), (source, method)


def test_tests_of_programs_are_texts():
    for source in ("codecontests", "openai/openai_humaneval"):
        check = scorer_for(source).problem
        assert check({"inputs": [1, ["a", 2]], "outputs": np.array([1, 2])}) is None
        assert check({"inputs": ["1"], "outputs": [None]}).startswith("outputs[0] must be a text, a number, or")
        assert check({"inputs": ["1"], "outputs": 5}) == "outputs must be a list of texts, got 5"
        assert "surrogate" in check({"inputs": ["\ud800"], "outputs": ["1"]})
        assert (
            check({"inputs": ["1"], "outputs": ["1"], "fn_name": 5}) == "fn_name must be the name of a function, got 5"
        )


def test_a_check_that_fails_is_a_problem_and_no_traceback():
    def check(ground_truth):
        return ground_truth["answer"]

    scorer = Scorer("mine", gsm8k.score, (), check)
    assert scorer.problem("5") == (
        "the check of ground truths failed on it (TypeError: string indices must be integers, not 'str')"
    )
