"""Countdown: an equation in ``<answer>`` that reaches the target, using every number once
(TinyZero).

Published semantics, on the response alone: the last line's last ``<answer>`` counts; 1 for a right
equation, 0.1 for any other, 0 for none. The equation is computed without ``eval``, and a power too
large to compute is a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reward_scores.arithmetic import CannotEvaluate, evaluate
from reward_scores.score import Score, as_text, graded, no_answer, plain
from reward_scores.tags import between, opened_tag

_GOLD = {"target": 9, "numbers": [1, 2, 3]}
EXAMPLES = (
    ("<think>add, then multiply</think>\n<answer> (1 + 2) * 3 </answer>", _GOLD, 1.0),
    ("<answer>1 + 2 * 3</answer>", _GOLD, 0.0),
    ("<answer>3 * 3</answer>", _GOLD, 0.0),
    ("<answer>9**9**9</answer>", {"target": 1, "numbers": [9, 9, 9]}, 0.0),
    ("(1 + 2) * 3", _GOLD, 0.0),
)
PROMPT_END = "Assistant:"  # the published scorer reads prompt and response, and looks behind this
TOLERANCE = 1e-5


def score(
    response: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any] | None = None,
    format_score: float = 0.1,
    correct_score: float = 1.0,
) -> Score:
    """Grade the response; ``ground_truth`` holds ``target`` and ``numbers``, as numbers or as texts
    of them."""
    equation = extract(PROMPT_END + opened_tag(extra_info, "answer") + response)
    if equation is None:
        return no_answer()
    target, numbers = read_ground_truth(ground_truth)
    right = uses_numbers(equation, numbers) and reaches(equation, target)
    return graded(right, equation, correct_score if right else format_score)


def read_ground_truth(ground_truth: Any) -> tuple[float, list[int]]:
    """Return the target and the numbers. Raises ValueError, with the field, for what no equation
    could reach or use."""
    if not isinstance(ground_truth, Mapping) or not {"target", "numbers"} <= set(ground_truth):
        raise ValueError(f"must hold target and numbers, got {ground_truth!r:.200}")
    target = as_text(ground_truth["target"])
    numbers = plain(ground_truth["numbers"])
    if not isinstance(target, str) or not re.fullmatch(
        r"\s*[+-]?\d{1,300}(\.\d+)?([eE][+-]?\d\d?)?\s*", target
    ):
        raise ValueError(f"target must be a number, got {ground_truth['target']!r:.200}")
    if not isinstance(numbers, list | tuple):
        raise ValueError(f"numbers must be a list of whole numbers, got {numbers!r:.200}")
    texts = [as_text(number) for number in numbers]
    for at, text in enumerate(texts):
        if not isinstance(text, str) or not re.fullmatch(r"\s*\d{1,4000}\s*", text):
            raise ValueError(
                f"numbers[{at}] must be a whole number that is not negative, got "
                f"{numbers[at]!r:.200}"
            )
    target = target.strip()  # int alone refuses U+001C to U+001F, which are spaces otherwise
    return float(target) if re.search(r"[.eE]", target) else int(target), [
        int(text.strip()) for text in texts
    ]


def extract(text: str) -> str | None:
    """Return the equation in a prompt and its response, as published."""
    for mark in (PROMPT_END, "<|im_start|>assistant"):
        if mark in text:
            last_line = text.partition(mark)[2].rpartition("\n")[2]
            found = between(last_line, "answer")
            return found[-1].strip() if found else None
    return None


def uses_numbers(equation: str, numbers: Any) -> bool:
    """Return whether the equation holds exactly these numbers, each as often as it is given."""
    found = re.findall(r"\d+", equation)
    if len(found) != len(numbers) or max(map(len, found), default=0) > 4000:
        return False
    return sorted(map(int, found)) == sorted(numbers)


def reaches(equation: str, target: float) -> bool:
    if not re.fullmatch(r"[\d+\-*/().\s]+", equation):
        return False
    try:
        return abs(evaluate(equation) - target) < TOLERANCE
    except (CannotEvaluate, OverflowError):
        return False


def check_ground_truth(
    ground_truth: Any, format_score: float = 0.1, correct_score: float = 1.0
) -> str | None:
    try:
        _, numbers = read_ground_truth(ground_truth)
    except ValueError as error:
        return str(error)
    return None if numbers else "numbers is empty"
