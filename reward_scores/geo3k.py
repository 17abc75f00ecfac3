"""Geometry3K (verl): 0.9 for the right ``\\boxed{}``, by PRM800K's grader, and 0.1 for ``<think>``
and a box.

The published grader refuses 3/6 for 1/2 and a decimal for a whole number, and an open last box
loses an earlier one; ``robust`` (by values) and ``math_verify`` (by the library of that name) do
neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_scores.equivalence import equivalent
from reward_scores.final_answer import last_closed_box
from reward_scores.latex import last_box
from reward_scores.prm800k import grade_answer
from reward_scores.score import Score, as_text, graded, no_answer, text_problem
from reward_scores.symbolic import MATH_VERIFY, SYMPY, math_verify_equal
from reward_scores.tags import opened_tag

# And the library that may not end
METHODS = {"published": SYMPY, "robust": None, "math_verify": MATH_VERIFY}
_EQUAL = {"published": grade_answer, "robust": equivalent, "math_verify": math_verify_equal}
EXAMPLES = (
    ("<think>AB = CD</think> so \\boxed{48}", "48", 1.0),
    ("<think>r</think> \\boxed{\\sqrt{128}}", "8\\sqrt{2}", 1.0),
    ("<think>r</think> \\boxed{49}", "48", 0.0),
    ("<think>r</think> 48", "48", 0.0),
)


def score(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    format_score: float = 0.1,
    method: str = "published",
) -> Score:
    """Return ``(1 - format_score) * acc + format_score * format``. A ``<think>`` that the prompt
    opened counts."""
    if method not in METHODS:
        raise ValueError(f"geo3k method={method!r}: must be one of {', '.join(METHODS)}")
    form = float(is_well_formed(opened_tag(extra_info, "think") + response))
    box = last_box(response, "\\boxed{") if method == "published" else last_closed_box(response)
    if box is None:
        return no_answer(format_score * form, format=form)
    right = _EQUAL[method](box.strip(), as_text(ground_truth))
    return graded(right, box.strip(), (1 - format_score) * right + format_score * form, format=form)


def is_well_formed(text: str) -> bool:
    """Return whether ``<think>`` is first, ``</think>`` follows, and an opened and closed box comes
    after one."""
    closed = text.find("</think>", len("<think>"))
    box = text.find("\\boxed{", closed)
    return text.startswith("<think>") and 0 <= closed < box and "}" in text[box:]


def check_ground_truth(
    ground_truth: Any, format_score: float = 0.1, method: str = "published"
) -> str | None:
    problem = text_problem(ground_truth, numbers=method != "published")
    if problem or as_text(ground_truth).strip():
        return problem
    return f"must be a string that is not empty, got {ground_truth!r:.200}"


def libraries(format_score: float = 0.1, method: str = "published") -> tuple[str, ...]:
    return (METHODS[method],) if METHODS.get(method) else ()
