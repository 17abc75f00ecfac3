"""PRIME's mathematics scorer: a generous reading of the answer, then PRM800K's grader, then numbers
within 1e-4.

Published semantics without its ``eval`` of model output: pi in a number is computed by
``reward_scores.arithmetic``, and answers of matrices written as Python lists are not read. It takes
0.01 for 1 and ``1,2`` for 12; ``robust`` and ``math_verify`` do not, and where there is a closed
box or an ``Answer:`` they read nothing else. They compare by values, and by the library of that
name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from reward_scores.arithmetic import CannotEvaluate, evaluate
from reward_scores.equivalence import cleaned, equivalent
from reward_scores.final_answer import final_answer
from reward_scores.latex import closing_brace
from reward_scores.prm800k import grade_answer
from reward_scores.score import Score, as_text, graded, no_answer, plain, text_problem
from reward_scores.symbolic import MATH_VERIFY, SYMPY, math_verify_equal

# And the library that may not end
METHODS = {"published": SYMPY, "robust": None, "math_verify": MATH_VERIFY}
EXAMPLES = (
    (r"Adding them gives \boxed{1+x}", "x+1", 1.0),
    (r"So the length is \boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
    ("The answer is 42.", "42", 1.0),
    (r"\boxed{43}", "42", 0.0),
    ("", "42", 0.0),
)
TOLERANCE = 1e-4
MAX_CHARS = 1000  # of an answer that is compared by value
_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_VERBS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "published",
) -> Score:
    """Return 1 for an equal answer. ``robust`` and ``math_verify`` compare exactly."""
    if method not in METHODS:
        raise ValueError(f"prime_math method={method!r}: must be one of {', '.join(METHODS)}")
    found, answer = match_answer(response)
    if method != "published" and (marked := final_answer(response)):
        found = True
        answer = marked
    right = _EQUAL[method](
        answer, str(plain(ground_truth) if method == "published" else as_text(ground_truth))
    )
    if not right and not found:
        return no_answer()
    return graded(right, cleaned(answer))


def match_answer(text: str) -> tuple[bool, str]:
    """Return whether the text marks an answer and that holds a digit, and the text that is left as
    the answer."""
    found = False
    for mark in _BEFORE:
        text, seen = _after_last(text, mark)
        found |= seen
    for mark in _AFTER:
        at = text.lower().rfind(mark)
        if at >= 0:
            found = True
            text = text[:at].strip()
    box = _last_box(text)
    if box:
        found = True
        text = box
    at = text.lower().rfind(". ")  # in lower case as published, where a letter may be longer
    text = text[:at].strip() if at >= 0 else text
    for mark in _VERBS:
        text, seen = _after_last(text, mark)
        found |= seen
    return found and any(char.isdigit() for char in text), text


def _after_last(text: str, mark: str) -> tuple[str, bool]:
    at = text.lower().rfind(mark)
    return (text[at + len(mark) :].strip(), True) if at >= 0 else (text, False)


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    opening = text.find("{", start)
    end = closing_brace(text, start)
    return None if end is None or opening < 0 else text[opening + 1 : end].strip()


def is_correct(answer: str, gold: str) -> bool:
    if grade_answer(answer, gold):
        return True
    values = (math.pi, 3.14) if "\\pi" in answer or "\\pi" in gold else (math.pi,)
    return any(_math_equal(answer, gold, pi) for pi in values)


_EQUAL = {"published": is_correct, "robust": equivalent, "math_verify": math_verify_equal}


def _math_equal(answer: str, gold: str, pi: float) -> bool:
    """Compare as text without case, spaces and brackets, or as numbers within 1e-4, a factor of 100
    allowed."""
    try:
        given = _value(answer, pi)
        wanted = _value(gold, pi)
    except (ValueError, OverflowError):
        return False
    given = given[:MAX_CHARS]
    if given.strip().lower() == wanted.strip().lower() or given.replace(" ", "") == wanted.replace(
        " ", ""
    ):
        return True
    numbers = _number(given), _number(wanted)
    if None not in numbers:
        number, goal = numbers
        return any(
            math.isclose(scaled, number, rel_tol=TOLERANCE)
            for scaled in (goal / 100, goal, goal * 100)
        )
    return bool(given) and _same_text_or_parts(given.strip(), wanted.strip())


def _same_text_or_parts(given: str, wanted: str) -> bool:
    bare_given = given
    bare_wanted = wanted
    listed = given[:1] == "[" and given[-1:] == "]" and wanted[:1] != "("
    tupled = given[:1] == "(" and given[-1:] == ")" and wanted[:1] != "["
    if listed or tupled:
        bare_given = given.strip("[]()")
        bare_wanted = wanted.strip("[]()")
    if re.sub(r"[{}()]", "", bare_given) == re.sub(r"[{}()]", "", bare_wanted):
        return True
    enclosed = given[:1] in ("(", "[") and given[-1:] in (")", "]") and wanted
    alike = enclosed and given[0] == wanted[0] and given[-1] == wanted[-1]
    if alike and _equal_lists(given[1:-1].split(","), wanted[1:-1].split(",")):
        return True
    if "," in given and "," in wanted:
        return _equal_lists(
            [part.strip() for part in given.split(",")],
            [part.strip() for part in wanted.split(",")],
        )
    return False


def _equal_lists(given: list[str], wanted: list[str]) -> bool:
    return len(given) == len(wanted) and all(
        _math_equal(a, b, math.pi) for a, b in zip(given, wanted, strict=True)
    )


def _value(text: str, pi: float) -> str:
    """Return the answer without ``$`` and ``%``, a number's base cut off, and pi as a number."""
    if re.match(r"\$\d+(\.\d+)?", text):
        return text[1:]
    if re.match(r"^\d+(\.\d+)?\\?%$", text):
        return text.replace("\\%", "").replace("%", "")
    if "_" in text:
        return str(int(float(text.partition("_")[0])))
    if "\\pi" not in text:
        return text
    text = re.sub(r"(?:(?<=\d)|(?<=\\pi))\\pi", f"*{pi}", text).replace("\\pi", f"1*{pi}")
    try:
        return repr(evaluate(text))
    except CannotEvaluate:
        return text


def _number(text: str) -> float | None:
    try:
        return float(text.replace("{,}" if "{,}" in text else ",", ""))
    except ValueError:
        return None


def check_ground_truth(ground_truth: Any, method: str = "published") -> str | None:
    problem = text_problem(ground_truth)
    if problem or cleaned(as_text(ground_truth)):
        return problem
    return f"must be a string that is not empty, got {ground_truth!r:.200}"


def libraries(method: str = "published") -> tuple[str, ...]:
    return (METHODS[method],) if METHODS.get(method) else ()
