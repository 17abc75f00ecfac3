"""The functions of ``verl.utils.reward_score`` that public reward functions call, by way of :mod:`reward_scores`.

Each has the name, the arguments and the kind of result of verl 0.6.1; the grading is this repository's, which agrees
with verl's on the published cases (tests/reward_scores). A function is named after its module: ``gsm8k__compute_score``
is ``verl.utils.reward_score.gsm8k.compute_score``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reward_scores import UnknownDataSource, geo3k, gsm8k, latex, math_dapo, math_reward, prime_code, prime_math, qa_em
from reward_scores import scorer_for as _scorer_for
from reward_scores.prm800k import grade_answer
from reward_scores.score import Score


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **options: Any
) -> float | dict[str, Any]:
    """Grade by the table of data sources. Raises NotImplementedError, as verl does, for a source without a scorer."""
    try:
        scorer = _scorer_for(data_source)
    except UnknownDataSource as error:
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}: {error}") from error
    score = scorer(solution_str, ground_truth, extra_info or {})
    return as_dict(score) if scorer.name == "math_dapo" else score.value


def as_dict(score: Score) -> dict[str, Any]:
    """Return a score as verl's math_dapo returns it."""
    return {"score": score.value, "acc": bool(score.acc), "pred": score.pred}


def gsm8k__extract_solution(solution_str: str, method: str = "strict") -> str | None:
    return gsm8k.extract(solution_str, method)


def gsm8k__compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    return gsm8k.score(solution_str, ground_truth, None, method, format_score, score).value


def math_reward__compute_score(solution_str: str, ground_truth: str) -> float:
    return math_reward.score(solution_str, ground_truth).value


def math_reward__is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    return math_reward.is_equiv(str1, str2)


def math_reward__strip_string(string: str) -> str:
    return math_reward.strip_string(string)


def math_reward__last_boxed_only_string(string: str) -> str | None:
    return math_reward.last_box(string)


def math_reward__remove_boxed(s: str) -> str:
    """Return a box's content. Raises AssertionError for what is no box: callers rely on it."""
    content = math_reward.unbox(s)
    assert content is not None, f"box error: {s}"
    return content


def math_dapo__last_boxed_only_string(string: str) -> str | None:
    box = latex.last_box(string, "\\boxed{")
    return None if box is None else f"\\boxed{{{box}}}"


def math_dapo__normalize_final_answer(final_answer: str) -> str:
    return math_dapo.normalize_final_answer(final_answer)


def math_dapo__is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = r"(?i)Answer\s*:\s*([^\n]+)"
) -> tuple[bool, str]:
    answers = re.findall(answer_pattern, solution_str)
    pred = math_dapo.normalize_final_answer(answers[-1] if answers else math_dapo.INVALID)
    gold = latex.last_box(gt, "\\boxed{") if gt_need_extract else gt
    return pred == math_dapo.normalize_final_answer(gold or ""), pred


def math_dapo__is_correct_strict_box(pred: str, gt: str, pause_tokens_index: Any = None) -> tuple[int, str | None]:
    right, box = math_dapo.verify(
        pred if pause_tokens_index is None else _last(pred, pause_tokens_index), gt, "strict_box"
    )
    return (1 if right else -1), box


def math_dapo__verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> tuple[bool, str | None]:
    if strict_box_verify:
        right, pred = math_dapo__is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return right == 1, pred
    return math_dapo__is_correct_minerva(solution_str, answer)


def math_dapo__compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    tail = solution_str[-math_dapo.WINDOW :]
    right, pred = math_dapo__verify(tail, ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def _last(text: str, pause_tokens_index: Sequence[int]) -> str:
    return text[pause_tokens_index[-1] - math_dapo.BOX_WINDOW :]


def math_verify__compute_score(model_output: str, ground_truth: str, timeout_score: float = 0.0) -> float:
    """Return 1 where math-verify finds an answer in the text that equals the gold one, else 0.

    What an answer makes it raise gives 0 as well. A package that it misses raises: no answer is wrong for that.
    """
    from math_verify import parse, verify

    # Without time limits of its own, which need the main thread: the graders' deadline holds.
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    try:
        return float(verify(gold, parse(model_output, parsing_timeout=None), timeout_seconds=None))
    except ImportError:
        raise
    except Exception:
        return 0.0


def geo3k__format_reward(predict_str: str) -> float:
    return float(geo3k.is_well_formed(predict_str))


def geo3k__acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    answer = latex.last_box(predict_str, "\\boxed{") if use_boxed else predict_str
    return float(answer is not None and grade_answer(answer.strip(), ground_truth))


def geo3k__compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    right = geo3k__acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * geo3k__format_reward(predict_str)


def prime_math__compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    score = prime_math.score(str(model_output), str(ground_truth))
    form = "Step 2:" in model_output and "\\box" in model_output
    return bool(score.acc), form or bool(score.acc), score.pred or ""


def prime_math__match_answer(response: str) -> tuple[bool, str]:
    return prime_math.match_answer(response)


def prime_math__grade_answer(given_answer: str, ground_truth: str) -> bool:
    return grade_answer(given_answer, ground_truth)


def prime_math__math_equal(prediction: str, reference: Any, **options: Any) -> bool:
    """Return whether two answers are equal for PRIME's scorer; its tolerances are not options here."""
    return prime_math.is_correct(str(prediction), str(reference))


def prime_code__compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, dict]:
    return prime_code.score(completion, test_cases, None, continuous=continuous).value, {}


def sandbox_fusion__compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: int = 10,
) -> tuple[float, list]:
    """Return the share of tests that a program passes on a server, whose own limit replaces the semaphore."""
    options = {"url": sandbox_fusion_url, "memory_limit_mb": memory_limit_mb or 1024, "timeout": timeout}
    return prime_code.score(completion, test_cases, continuous=continuous, sandbox_fusion=options).value, []


def search_r1_like_qa_em__normalize_answer(s: str) -> str:
    return qa_em.normalize_answer(s)


def search_r1_like_qa_em__em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    said = qa_em.normalize_answer(prediction)
    return int(any(said == qa_em.normalize_answer(gold) for gold in _golds(golden_answers)))


def search_r1_like_qa_em__subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    said = qa_em.normalize_answer(prediction)
    return int(any(qa_em.normalize_answer(gold) in said for gold in _golds(golden_answers)))


def search_r1_like_qa_em__extract_solution(solution_str: str) -> str | None:
    return qa_em.extract(solution_str)


def search_r1_like_qa_em__compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    return qa_em.score(solution_str, ground_truth, None, "em", format_score, score).value


def search_r1_like_qa_em__compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    return qa_em.score(solution_str, ground_truth, None, "subem", format_score, score).value


def math_batch__compute_score_batched(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Any]
) -> list[float]:
    return [math_reward__compute_score(*one) for one in zip(solution_strs, ground_truths, strict=True)]


def _golds(golden_answers: str | Sequence[str]) -> Sequence[str]:
    return [golden_answers] if isinstance(golden_answers, str) else golden_answers
