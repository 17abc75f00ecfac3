"""DAPO's mathematics scorer: the last ``Answer:`` line after Minerva's normalisation; +1 right, -1
wrong.

``method="fallback"`` (verl in 2026) reads the last ``\\boxed{}`` of the last 100 characters,
unnormalised, where there is no ``Answer:``; ``minerva_only`` (up to v0.6.1) does not;
``strict_box`` reads nothing else. All of them read the last 300 characters only and misjudge
``**Answer:** 34``, ``34.`` and ``34\\%``; ``robust`` (by values) and ``math_verify`` (by the
library of that name) do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reward_scores.equivalence import cleaned, equivalent
from reward_scores.final_answer import final_answer
from reward_scores.latex import last_box
from reward_scores.score import Score, as_text, graded, no_answer, text_problem
from reward_scores.symbolic import MATH_VERIFY, math_verify_equal

PUBLISHED = ("fallback", "minerva_only", "strict_box")
# And the library that may not end
METHODS = {**dict.fromkeys(PUBLISHED), "robust": None, "math_verify": MATH_VERIFY}
INVALID = "[INVALID]"
WINDOW, BOX_WINDOW = 300, 100  # characters from the end
EXAMPLES = (
    ("So x = 34.\nAnswer: $\\boxed{34}$", "34", 1.0),
    ("\\boxed{34}\nAnswer: \\boxed{35}", "34", 0.0),
    ("I do not know.", "34", 0.0),
)


def score(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "fallback",
) -> Score:
    """Return +1 for the gold answer and -1 for everything else. A number as ground truth is read as
    text."""
    ground_truth = as_text(ground_truth)
    if method not in METHODS:
        raise ValueError(f"math_dapo method={method!r}: must be one of {', '.join(METHODS)}")
    if method not in PUBLISHED:
        answer = final_answer(response, True)
        equal = equivalent if method == "robust" else math_verify_equal
        right = answer is not None and equal(answer, ground_truth)
        pred = None if answer is None else cleaned(answer)
    else:
        right, pred = verify(response[-WINDOW:], ground_truth, method)
    if not right and pred in (None, INVALID):
        return no_answer(-1.0)
    return graded(right, pred, 1.0 if right else -1.0)


def verify(text: str, ground_truth: str, method: str) -> tuple[bool, str | None]:
    """Return whether the answer is right, and the answer, as the published function does behind its
    window."""
    if method != "strict_box":
        lines = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text)
        pred = normalize_final_answer(lines[-1] if lines else INVALID)
        if pred != INVALID or method == "minerva_only":
            return pred == normalize_final_answer(ground_truth), pred
    box = last_box(text[-BOX_WINDOW:], "\\boxed{")
    if box is not None or method == "strict_box":
        return box == ground_truth, box
    return normalize_final_answer(ground_truth) == INVALID, INVALID


# Minerva (Lewkowycz et al., 2022), appendix D.1, with the lists as published: the order matters.
_SUBSTITUTIONS = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_WORDS = """
square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits
cents degrees cm gm pounds meters meals edges students childrentickets multiples
"""
_REMOVED = (
    *_WORDS.split(),
    *(f"\\text{{{word}" for word in ("s}", ".}", "\ns}", "}^2", "}^3", "\n}", "}")),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_PATTERNS = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    *((rf"(\\{name}\{{)(.*?)(\}})", r"\2") for name in ("text", "textbf", "overline")),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def normalize_final_answer(answer: str) -> str:
    """Return the normal form of an answer; its deletions reach into words, as published."""
    answer = answer.rpartition("=")[2]
    for old, new in _SUBSTITUTIONS:
        answer = answer.replace(old, new)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    for pattern, replacement in _PATTERNS:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def check_ground_truth(ground_truth: Any, method: str = "fallback") -> str | None:
    problem = text_problem(ground_truth, numbers=method not in PUBLISHED)
    if problem:
        return problem
    text = as_text(ground_truth)
    normal = normalize_final_answer(text) if method in PUBLISHED else cleaned(text)
    if not normal or normal == INVALID:
        return f"{ground_truth!r:.200} normalises to {normal!r}, which no answer may match"
    return None


def libraries(method: str = "fallback") -> tuple[str, ...]:
    return (METHODS[method],) if METHODS.get(method) else ()
