"""Geometry3K (verl): 0.9 for the right ``\\boxed{}``, by PRM800K's grader, and 0.1 for ``<think>`` and a box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.types import Score
from reward_scores.latex import last_box
from reward_scores.prm800k import grade_answer
from reward_scores.verdict import graded, no_answer

EXAMPLES = (
    ("<think>AB = CD</think> so \\boxed{48}", "48", 1.0),
    ("<think>r</think> \\boxed{\\sqrt{128}}", "8\\sqrt{2}", 1.0),
    ("<think>r</think> \\boxed{49}", "48", 0.0),
    ("<think>r</think> 48", "48", 0.0),
)


def score(
    response: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, format_score: float = 0.1
) -> Score:
    """``(1 - format_score) * acc + format_score * format``."""
    form = float(is_well_formed(response))
    box = last_box(response, "\\boxed{")
    if box is None:
        return no_answer(format_score * form, format=form)
    right = grade_answer(box.strip(), ground_truth)
    return graded(right, box.strip(), (1 - format_score) * right + format_score * form, format=form)


def is_well_formed(text: str) -> bool:
    """``<think>`` first, ``</think>`` somewhere, and an opened and closed box after one."""
    closed = text.find("</think>", len("<think>"))
    box = text.find("\\boxed{", closed)
    return text.startswith("<think>") and 0 <= closed < box and "}" in text[box:]


def check_ground_truth(ground_truth: Any, format_score: float = 0.1) -> str | None:
    if isinstance(ground_truth, str) and ground_truth.strip():
        return None
    return f"must be a string that is not empty, got {ground_truth!r:.200}"
