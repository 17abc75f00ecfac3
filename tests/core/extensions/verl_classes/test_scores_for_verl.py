"""The functions of ``verl.utils.reward_score``: verl's names, arguments and kinds of result."""

from __future__ import annotations

import pytest

from core.config.plugins import load_object
from core.extensions.verl_classes.shim import MODULES
from core.rewards.custom_reward import CustomFunction
from core.rewards.grading import Job, Scorers, as_score

SCORE = "verl.utils.reward_score"
BOX, ANSWER = "so \\boxed{42}", "Answer: 42"
QA = {"target": ["Paris", "Paris, France"]}


@pytest.mark.parametrize(
    ("function", "arguments", "result"),
    [
        ("gsm8k.compute_score", ("#### 42", "42"), 1.0),
        ("gsm8k.compute_score", ("it is 42.", "42", "flexible"), 0.0),  # "42." is published as another answer
        ("gsm8k.compute_score", ("it is 41", "42", "flexible", 0.1), 0.1),
        ("gsm8k.extract_solution", ("#### 1,234",), "1234"),
        ("gsm8k.extract_solution", ("none",), None),
        ("math.compute_score", (BOX, "42"), 1.0),
        ("math_reward.is_equiv", ("\\frac12", "\\frac{1}{2}"), True),
        ("math_reward.last_boxed_only_string", (f"a {BOX} b",), "\\boxed{42}"),
        ("math_reward.remove_boxed", ("\\boxed{42}",), "42"),
        ("math_dapo.last_boxed_only_string", (BOX,), "\\boxed{42}"),
        ("math_dapo.remove_boxed", ("\\boxed{42}",), "42"),
        ("math_dapo.normalize_final_answer", ("x = 1,000 dollars",), "1000"),
        ("math_dapo.is_correct_minerva", (ANSWER, "\\boxed{42}", True), (True, "42")),
        ("math_dapo.is_correct_strict_box", (BOX, "42"), (1, "42")),
        ("math_dapo.is_correct_strict_box", (BOX, "41"), (-1, "42")),
        ("math_dapo.verify", (BOX, "42"), (False, "[INVALID]")),
        ("math_dapo.verify", (BOX, "42", True), (True, "42")),
        ("math_dapo.compute_score", (ANSWER, "42"), {"score": 1.0, "acc": True, "pred": "42"}),
        ("math_dapo.compute_score", (BOX, "42"), {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
        ("math_dapo.compute_score", (BOX, "42", True), {"score": 1.0, "acc": True, "pred": "42"}),
        ("math_verify.compute_score", (BOX, "42"), 1.0),
        ("math_verify.compute_score", ("no idea", "42"), 0.0),
        ("math_batch.compute_score_batched", (["a"] * 2, [BOX, "x"], ["42"] * 2, [{}] * 2), [1.0, 0.0]),
        ("geo3k.acc_reward", ("x \\boxed{8\\sqrt{2}}", "\\sqrt{128}"), 1.0),
        ("geo3k.compute_score", ("\\boxed{48}", "48"), 0.9),
        ("prime_math.compute_score", (BOX, "42"), (True, True, "42")),
        ("prime_math.match_answer", ("the answer is 42",), (True, "42")),
        ("prime_math.grade_answer", ("1/2", "\\frac{1}{2}"), True),
        ("prime_math.grader.math_equal", ("0.5", "1/2"), True),
        ("search_r1_like_qa_em.em_check", ("the paris", QA["target"]), 1),
        ("search_r1_like_qa_em.subem_check", ("in Paris", "Paris"), 1),
        ("search_r1_like_qa_em.extract_solution", ("<answer> Paris </answer>",), "Paris"),
        ("search_r1_like_qa_em.compute_score", ("<answer>Paris</answer>", QA), 1.0),
        ("search_r1_like_qa_em.compute_score_subem", ("<answer>in Paris</answer>", QA), 1.0),
    ],
)
def test_what_a_function_returns(function, arguments, result):
    module, _, name = function.rpartition(".")
    found = load_object(MODULES[f"{SCORE}.{module}"][name])(*arguments)
    assert found == result and type(found) is type(result)


def test_no_box_is_an_assertion_error_as_callers_expect():
    with pytest.raises(AssertionError):
        load_object(MODULES[f"{SCORE}.math_reward"]["remove_boxed"])("42")


@pytest.mark.parametrize(("error", "score"), [(RecursionError, 0.0), (ModuleNotFoundError, None)])
def test_what_math_verify_raises_of_an_answer_is_wrong_but_a_missing_package_is_told(error, score, monkeypatch):
    def fails(*_, **__):
        raise error("no antlr4")

    monkeypatch.setattr("math_verify.verify", fails)
    compute = load_object(MODULES[f"{SCORE}.math_verify"]["compute_score"])
    if score is None:
        with pytest.raises(error, match="antlr4"):
            compute(BOX, "42")
    else:
        assert compute(BOX, "42") == score


def test_the_default_function_has_verls_results_and_errors():
    default = load_object(MODULES[SCORE]["default_compute_score"])
    assert default("openai/gsm8k", "#### 4", "4") == 1.0
    assert default("aime_2024", "Answer: 4", "4", {})["acc"] is True
    with pytest.raises(NotImplementedError, match="data_source='mine'"):
        default("mine", "#### 4", "4")


def test_a_function_of_a_users_that_calls_verls_helpers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.utils.reward_score import default_compute_score, math_dapo\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    from verl.utils.reward_score.math import last_boxed_only_string, remove_boxed\n"
        "    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)\n"
        "    box = last_boxed_only_string(solution_str)\n"
        "    result['score'] += 0.5 * (extra_info['num_turns'] - 2)\n"
        "    return {**result, 'box': remove_boxed(box) if box else ''}\n"
    )
    scorers = Scorers(custom=CustomFunction(str(tmp_path / "mine.py")))
    score = as_score(scorers(Job("mine", BOX, "42", {"num_turns": 3})))
    assert (score.value, score.acc, score.pred, score.notes["box"]) == (1.5, 1.0, "42", "42")
