"""What this repository answers to the golden vectors of scorers: for each file a function from a
case's inputs to the fields of its ``expected``, by published name.

``ROBUST`` gives the answer of the robust variant, which is held to ``recommended``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from reward_scores import (
    UnknownDataSource,
    countdown,
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    multiply,
    prime_math,
    prm800k,
    qa_em,
    qa_em_format,
    scorer_for,
)
from tests import golden_code
from tests.golden_io import golden_dir

Inputs = Mapping[str, Any]
SOLUTION, GOLD = itemgetter("solution_str"), itemgetter("ground_truth")


class Raised(str):
    """Stands for an exception: equal to every recorded ``Type: message``."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.partition(":")[0].endswith("Error")

    __hash__ = str.__hash__


def raw_cases(file: str) -> list[dict[str, Any]]:
    """The cases as they stand: a text that reads ``nan`` is a text here, not a number."""
    path = golden_dir() / f"{file}.json"
    return json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else []


def _gsm8k(given: Inputs) -> dict[str, Any]:
    method = given.get("method", "strict")
    kwargs = {
        "format_score": given.get("format_score", 0.0),
        "correct_score": given.get("score", 1.0),
    }
    score = gsm8k.score(given["solution_str"], given["ground_truth"], {}, method, **kwargs)
    return {"extracted": gsm8k.extract(given["solution_str"], method), "score": score.value}


def _stripped(answer: str | None) -> str | None:
    try:
        return None if answer is None else math_reward.strip_string(answer)
    except ValueError:
        return Raised()


def _math_is_equiv(given: Inputs) -> dict[str, Any]:
    answer, gold = given["answer"], given["ground_truth"]
    return {
        "is_equiv": math_reward.is_equiv(answer, gold),
        "strip_answer": _stripped(answer),
        "strip_ground_truth": _stripped(gold),
        "compute_score_of_boxed_answer": math_reward.score(f"\\boxed{{{answer}}}", gold).value,
    }


def _math_compute_score(given: Inputs) -> dict[str, Any]:
    text = given["solution_str"]
    return {
        "last_boxed": math_reward.last_box(text),
        "score": math_reward.score(text, given["ground_truth"]).value,
    }


def _math_dapo(given: Inputs) -> dict[str, Any]:
    strict = given.get("strict_box_verify", False)
    method = "strict_box" if strict else given.get("variant") or "fallback"
    text, gold = given["solution_str"], given["ground_truth"]
    right, pred = math_dapo.verify(text[-math_dapo.WINDOW :], gold, method)
    score = math_dapo.score(text, gold, {}, method)
    assert score.acc == right
    return {"score": score.value, "acc": right, "pred": pred}


def _prime_math(given: Inputs) -> dict[str, Any]:
    text, gold = str(given["model_output"]), str(given["ground_truth"])
    found, answer = prime_math.match_answer(text)
    simple = prm800k.grade_answer(answer, gold)
    return {
        "is_correct": bool(prime_math.score(text, gold).value),
        # Of no use, and so no part of the score
        "format": simple or ("Step 2:" in text and "\\box" in text),
        "extracted": answer,
        "match_answer": [found, answer],
        "grade_answer": simple,
    }


def _qa(given: Inputs, min_answers: int, max_tags: int | None) -> dict[str, Any]:
    def value(method: str, **kwargs: float) -> float:
        options = {"method": method, "min_answers": min_answers, "max_tags": max_tags, **kwargs}
        return qa_em.score(given["solution_str"], {"target": given["target"]}, {}, **options).value

    return {
        "extracted": qa_em.extract(given["solution_str"], min_answers),
        "em": value("em"),
        "subem": value("subem"),
        "em_format0.1_score2": value("em", format_score=0.1, correct_score=2),
    }


def _qa_em_format(given: Inputs) -> dict[str, Any]:
    text, golds = given["solution_str"], qa_em.targets(given)
    problem = qa_em_format.structure_problem(text)
    retrieved = qa_em_format.is_retrieved(qa_em_format.blocks(text), golds)
    names = ("structure_format_score", "final_format_score", "retrieval_score")

    def value(*bonuses: float) -> float:
        # The vectors are prompt and response, the prompt has an example
        answer = qa_em.extract(text, min_answers=2)
        return qa_em_format.judge(
            problem is None, retrieved, answer, golds, (*bonuses, given.get("score", 1.0))
        ).value

    return {
        "valid": problem is None,
        "reason": problem or "Valid sequence format",
        "retrieval_correct": retrieved,
        "score": value(*(given.get(name, 0.0) for name in names)),
        "score_zero_bonuses": value(0.0, 0.0, 0.0),
    }


def _countdown(given: Inputs) -> dict[str, Any]:
    text, gold = given["solution_str"], given["ground_truth"]
    equation = countdown.extract(text)
    response = text if equation is None else f"<answer>{equation}</answer>"
    value = countdown.score(response, gold).value if equation is not None else 0.0
    return {"equation": equation, "score": value}


def _multiply(given: Inputs) -> dict[str, Any]:
    answer = multiply.extract(given["solution_str"])
    value = multiply.score(f"<answer>{answer}</answer>", given["ground_truth"]).value
    return {"extracted": answer, "score": value}


def _geo3k(given: Inputs) -> dict[str, Any]:
    score = geo3k.score(given["predict_str"], given["ground_truth"])
    return {"format": score.parts["format"], "acc": score.acc, "score": score.value}


def _dispatch(given: Inputs) -> dict[str, Any]:
    scorer = scorer_for(given["data_source"])
    score = scorer(given["solution_str"], given["ground_truth"])
    if scorer.name == "math_dapo":
        return {"result": {"score": score.value, "acc": bool(score.acc), "pred": score.pred}}
    return {"result": score.value}


ANSWERS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "reward_gsm8k": _gsm8k,
    "reward_math_is_equiv": _math_is_equiv,
    "reward_math_compute_score": _math_compute_score,
    "reward_math_dapo": _math_dapo,
    "reward_math_dapo_normalize": lambda given: {
        "normalized": math_dapo.normalize_final_answer(given["final_answer"])
    },
    "reward_prime_math": _prime_math,
    "reward_qa_normalize": lambda given: {"normalized": qa_em.normalize_answer(given["s"])},
    "reward_search_r1_like_qa_em": lambda given: _qa(given, 1, 10),
    "reward_search_r1_qa_em_original": lambda given: _qa(given, 2, None),
    "reward_search_r1_qa_em_format": _qa_em_format,
    "reward_countdown": _countdown,
    "reward_multiply": _multiply,
    "reward_geo3k": _geo3k,
    "reward_dispatch": _dispatch,
    **golden_code.ANSWERS,
}

ROBUST: dict[str, Callable[[Inputs], float]] = {
    file: lambda given, score=score, answer=answer, gold=gold: (
        score(answer(given), gold(given), {}, "robust").value
    )
    for file, score, answer, gold in (
        ("reward_gsm8k", gsm8k.score, SOLUTION, GOLD),
        (
            "reward_math_is_equiv",
            math_reward.score,
            lambda given: f"\\boxed{{{given['answer']}}}",
            GOLD,
        ),
        ("reward_math_compute_score", math_reward.score, SOLUTION, GOLD),
        ("reward_math_dapo", math_dapo.score, SOLUTION, GOLD),
        ("reward_prime_math", prime_math.score, itemgetter("model_output"), GOLD),
        (
            "reward_search_r1_like_qa_em",
            qa_em.score,
            SOLUTION,
            lambda given: {"target": given["target"]},
        ),
    )
}

ERRORS = (UnknownDataSource, ValueError)


def departure(file: str, case: Mapping[str, Any]) -> str:
    """Why this case is not answered as published; nothing where it is."""
    search_r1 = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    if file == "reward_dispatch" and case["inputs"]["data_source"] in (
        *search_r1,
        "countdown",
        "multiply",
    ):
        return (
            "registered here, as in Search-R1's and TinyZero's tables; verl's own table has no "
            "such name"
        )
    return ""
