"""Gold answers of public data sets: right against themselves as a model would write them, wrong against another.

Needs the data sets under the folder named by the environment variable ``DATA_DIR``.
"""

from __future__ import annotations

import os

import pytest

from reward_scores import gsm8k, math_dapo, math_reward, prime_math, qa_em
from tests.gold_answers import lines, math_golds, math_solutions, qa_golds

if "DATA_DIR" not in os.environ:
    pytest.skip("set DATA_DIR to the folder of the data sets", allow_module_level=True)


def wrong_number(gold: str) -> str:
    """Another whole number, too far away for prime_math's tolerance and no hundredfold."""
    return str(3 * int(gold.replace(",", "")) + 7)


@pytest.mark.parametrize(("file", "rows"), [("train", 7473), ("test", 1319), ("test_socratic", 1319)])
def test_gsm8k_gold_solutions(file, rows):
    solutions = [row["answer"] for row in lines(f"gsm8k/{file}.jsonl")]
    assert len(solutions) == rows
    for solution in solutions:
        written = solution.rpartition("#### ")[2].strip()
        gold = written.replace(",", "")
        for method in gsm8k.METHODS:
            right = 0.0 if method == "flexible" and "," in written else 1.0  # published: flexible keeps the comma
            assert gsm8k.score(solution, gold, {}, method).acc == right, (method, written)
            assert gsm8k.score(f"#### {wrong_number(gold)}", gold, {}, method).acc == 0.0
            assert gsm8k.check_ground_truth(gold, method) is None


@pytest.mark.parametrize("method", math_reward.METHODS)
def test_math_gold_solutions(method):
    pairs = math_solutions()
    assert len(pairs) == 5500
    for solution, gold in pairs:
        assert math_reward.check_ground_truth(gold, method) is None, gold
        assert math_reward.score(solution, gold, {}, method).acc == 1.0, gold


# prime_math reads on behind "are ", "=" and the like, also inside a box: "12 square units" is "units", 4x-5y=-50 is -50
PRIME_MISREADS = ("are ", "is ", "=", "be ", ": ", ". ")
# the box is the answer line's, and a line ends where the gold answer has a line break
NATURAL = {
    math_reward: ("published", "So the answer is \\boxed{{{}}}."),
    math_dapo: ("fallback", "So it is.\nAnswer: {}"),
    prime_math: ("published", "So we get $\\boxed{{{}}}$."),
}


@pytest.mark.parametrize("module", NATURAL, ids=lambda module: module.__name__)
def test_math_golds_against_themselves(module):
    golds = math_golds()
    assert len(golds) > 4000
    published, form = NATURAL[module]
    for gold in golds:
        gold = " ".join(gold.split())
        misread = module is prime_math and any(mark in gold for mark in PRIME_MISREADS)
        for method in (published, "robust", "math_verify"):
            if misread and method == published:
                continue
            assert module.score(form.format(gold), gold, {}, method).acc == 1.0, (method, gold)


def test_qa_golds(capsys):
    rows = qa_golds()
    assert len(rows) > 38_000
    nothing = []
    for golds, others in zip(rows, rows[1:] + rows[:1], strict=True):
        truth = {"target": golds}
        normal = [qa_em.normalize_answer(gold) for gold in golds]
        for gold, form in zip(golds, normal, strict=True):
            response = f"<think>hm</think> <answer>{gold}</answer>"
            if not form:
                nothing.append(gold)
                assert qa_em.score(response, truth, {}, "robust").acc == 1.0
                assert qa_em.score("<answer></answer>", {"target": [gold]}, {}, "robust").acc == 0.0
                continue
            for method in qa_em.METHODS if gold is golds[0] else ("em",):
                assert qa_em.score(response, truth, {}, method).acc == 1.0, (method, gold)
        other = qa_em.normalize_answer(others[0])
        if other and other not in normal:
            response = f"<answer>{others[0]}</answer>"
            for method in ("em", "f1", "robust"):
                assert qa_em.score(response, truth, {}, method).acc == 0.0, (method, others[0], golds)
            if not any(form in other for form in normal):
                assert qa_em.score(response, truth, {}, "subem").acc == 0.0, (others[0], golds)
    with capsys.disabled():
        print(f"\n{len(nothing)} gold answers normalise to nothing: {' '.join(sorted(set(nothing)))}")
    assert 0 < len(nothing) < 100
