"""Multiplication (TinyZero): a whole number in ``<answer>``; 1 for the right one, 0.1 for another,
0 for none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reward_scores.score import Score, as_text, graded, no_answer
from reward_scores.tags import between, opened_tag

EXAMPLES = (
    ("<think>3 * 4</think><answer> 12 </answer>", "12", 1.0),
    ("<answer>12</answer> or <answer>13</answer>", "12", 0.0),
    ("<answer>1,2</answer>", "12", 0.0),
)
PROMPT_END = "Assistant:"  # the published scorer reads prompt and response, and looks behind this
MAX_DIGITS = 4000  # Python refuses to read longer integers


def score(
    response: str,
    ground_truth: str | int,
    extra_info: Mapping[str, Any] | None = None,
    format_score: float = 0.1,
    correct_score: float = 1.0,
) -> Score:
    """Grade the response by the last ``<answer>``, which must be a whole number on one line."""
    answer = extract(PROMPT_END + opened_tag(extra_info, "answer") + response)
    if answer is None:
        return no_answer()
    # int alone refuses U+001C to U+001F, which are spaces otherwise.
    right = int(answer) == int(str(as_text(ground_truth)).strip())
    return graded(right, str(int(answer)), correct_score if right else format_score)


def extract(text: str) -> str | None:
    """Return the answer in a prompt and its response, as published; None where it is not a whole
    number."""
    if PROMPT_END not in text:
        return None
    found = between(text.partition(PROMPT_END)[2], "answer", one_line=True)
    answer = found[-1].strip() if found else ""
    return (
        answer if len(answer) <= MAX_DIGITS and re.fullmatch(r"[+-]?\d+(_\d+)*", answer) else None
    )


def check_ground_truth(
    ground_truth: Any, format_score: float = 0.1, correct_score: float = 1.0
) -> str | None:
    whole = re.fullmatch(r"\s*[+-]?\d{1,4000}\s*", str(as_text(ground_truth)))
    return None if whole else f"must be a whole number, got {ground_truth!r:.200}"
