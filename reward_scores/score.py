"""What a scorer returns, and the parts of every scorer: the kinds of score, and the entry of the table of scorers.

The table itself is in :mod:`reward_scores`. Nothing here imports the rest of the repository, so the scorers can be used
alone; running them in processes with a deadline is the caller's work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ScoreStatus(str, Enum):
    """The outcome of grading an answer. Everything but OK and WRONG is also a rate in the metrics."""

    OK = "ok"
    WRONG = "wrong"
    PARSE_ERROR = "parse_error"  # the scorer found no answer to judge
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True)
class Score:
    """The score of an answer: ``value`` trains, ``parts`` explain, and ``parts["acc"]`` counts as correct."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    status: ScoreStatus = ScoreStatus.OK
    masked: bool = False  # carries no loss and is left out of every denominator
    pred: str | None = None  # the answer that was read from the text; maj@k votes on it
    notes: Mapping[str, str] = field(default_factory=dict)  # what explains and is no number; only samples show it

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a score must be finite, got {self.value}")
        object.__setattr__(self, "parts", {"acc": self.value, **self.parts})

    @property
    def acc(self) -> float:
        return self.parts["acc"]

    def plus(self, name: str, amount: float) -> Score:
        """Return the score with a named component added to its value; ``acc`` keeps its meaning."""
        return dataclasses.replace(self, value=self.value + amount, parts={**self.parts, name: amount})


# response, ground truth, the accuracy that the scorer must give it
Example = tuple[str, Any, float]


def graded(right: bool, pred: str | None, value: float | None = None, **parts: float) -> Score:
    """Return the score of an answer that could be graded: ``acc`` is 1 or 0, and so is ``value`` unless given."""
    acc = float(right)
    status = ScoreStatus.OK if right else ScoreStatus.WRONG
    return Score(acc if value is None else float(value), {"acc": acc, **parts}, status, pred=pred)


def no_answer(value: float = 0.0, **parts: float) -> Score:
    """Return the score of a response in which no answer was found."""
    return Score(float(value), {"acc": 0.0, **parts}, ScoreStatus.PARSE_ERROR)


def as_text(ground_truth: Any) -> Any:
    """Return a number as the text of it, for scorers that compare texts; anything else as it is."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, (int, float)):
        return ground_truth
    whole = isinstance(ground_truth, float) and ground_truth.is_integer()
    return str(int(ground_truth) if whole else ground_truth)


def any_ground_truth(ground_truth: Any, **options: Any) -> str | None:
    return None


def no_libraries(**options: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, eq=False)
class Scorer:
    """A scoring function with its name, examples, and needs.

    Args:
        name: the key of its options in ``reward_model.reward_kwargs``.
        score: ``score(response, ground_truth, extra_info, **options) -> Score``; pure.
        examples: answers that it must grade as stated, graded when a run starts.
        check_ground_truth: ``(ground_truth, **options) -> problem or None``.
        libraries: ``(**options) -> what is called on``: libraries whose work may not end, each as the function
            (``module:name``) that imports and warms it. With any, answers are graded in processes that can be killed.
    """

    name: str
    score: Callable[..., Score]
    examples: tuple[Example, ...]
    check_ground_truth: Callable[..., str | None] = any_ground_truth
    libraries: Callable[..., tuple[str, ...]] = no_libraries

    def __call__(
        self, response: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **options: Any
    ) -> Score:
        return self.score(response, ground_truth, extra_info or {}, **options)
