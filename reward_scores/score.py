"""What a scorer returns, and the parts of every scorer: the kinds of score, and the entry of the
table of scorers.

The table itself is in :mod:`reward_scores`. Nothing here imports the rest of the repository, so the
scorers can be used alone; running them in processes with a deadline is the caller's work.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Any

# The part that :meth:`Score.keeping_raw` adds, under the name that verl's filters have for it
RAW = "score"
# How pandas and JSON write a value that is missing, where it was turned into text
MISSING = ("nan", "none", "null", "<na>", "nat")
_LIST_AS_TEXT = re.compile(r"""\[\s*(["']).*\1\s*\]""", re.DOTALL)


class ScoreStatus(str, Enum):
    """The outcome of grading an answer. Everything but OK and WRONG is also a rate in the
    metrics."""

    OK = "ok"
    WRONG = "wrong"
    PARSE_ERROR = "parse_error"  # the scorer found no answer to judge
    TIMEOUT = "timeout"
    CRASH = "crash"

    # Python 3.11.2 would store a call of getattr, which torch does not load
    def __reduce_ex__(self, protocol):
        return type(self), (self.value,)


@dataclass(frozen=True)
class Score:
    """The score of an answer: ``value`` trains, ``parts`` explain, and ``parts["acc"]`` counts as
    correct."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    status: ScoreStatus = ScoreStatus.OK
    masked: bool = False  # carries no loss and is left out of every denominator
    pred: str | None = None  # the answer that was read from the text; maj@k votes on it
    # What explains and is no number; only samples show it
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a score must be finite, got {self.value}")
        object.__setattr__(self, "parts", {"acc": self.value, **self.parts})

    @property
    def acc(self) -> float:
        return self.parts["acc"]

    @property
    def ungraded(self) -> bool:
        """Return whether the scorer failed, so that the value is no judgement of the answer."""
        return self.status in (ScoreStatus.TIMEOUT, ScoreStatus.CRASH)

    @property
    def left_out(self) -> bool:
        """Return whether the answer enters neither the loss nor its group's statistics."""
        return self.masked and self.ungraded

    @property
    def raw(self) -> float:
        """Return what the scorer gave, whatever a recipe has made of ``value``."""
        return self.parts[RAW]

    def keeping_raw(self) -> Score:
        """Return the scorer's own score with its value as a part, which stays as it is where the
        score is shaped."""
        return dataclasses.replace(self, parts={**self.parts, RAW: self.value})

    def plus(self, name: str, amount: float) -> Score:
        """Return the score with a named component added to its value; ``acc`` keeps its meaning."""
        return dataclasses.replace(
            self, value=self.value + amount, parts={**self.parts, name: amount}
        )


# response, ground truth, the accuracy that the scorer must give it
Example = tuple[str, Any, float]


def graded(right: bool, pred: str | None, value: float | None = None, **parts: float) -> Score:
    """Return the score of an answer that could be graded: ``acc`` is 1 or 0, and so is ``value``
    unless given."""
    acc = float(right)
    status = ScoreStatus.OK if right else ScoreStatus.WRONG
    return Score(acc if value is None else float(value), {"acc": acc, **parts}, status, pred=pred)


def no_answer(value: float = 0.0, **parts: float) -> Score:
    """Return the score of a response in which no answer was found."""
    return Score(float(value), {"acc": 0.0, **parts}, ScoreStatus.PARSE_ERROR)


def plain(value: Any) -> Any:
    """Return numpy's arrays and scalars as Python's lists and numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_text(ground_truth: Any) -> Any:
    """Return a finite number as the text of it, for scorers that compare texts; anything else as it
    is."""
    value = plain(ground_truth)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return value
    if not isinstance(value, int) and not math.isfinite(value):
        return value
    return str(int(value) if value == int(value) else value)


def text_problem(ground_truth: Any, numbers: bool = True) -> str | None:
    """Return what is wrong with a ground truth that must be one text, or with ``numbers`` a
    number."""
    text = as_text(ground_truth) if numbers else ground_truth
    if not isinstance(text, str):
        return f"must be a string, got {ground_truth!r:.200}"
    if text.strip().casefold() in MISSING:
        return f"reads {text!r}, which is how a missing value looks as text"
    if _LIST_AS_TEXT.fullmatch(text.strip()):
        return f"is a list that was written as text, {text!r:.200}: write the answer itself"
    return None


def any_ground_truth(ground_truth: Any, **options: Any) -> None:
    """Find no problem with a ground truth, and nothing to remark."""


def no_libraries(**options: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, eq=False)
class Scorer:
    """A scoring function with its name, examples, and needs."""

    name: str  # the key of its options in ``reward_model.reward_kwargs``
    score: Callable[..., Score]  # pure: (response, ground_truth, extra_info, **options)
    examples: tuple[Example, ...]  # graded when a run starts: it must grade them as stated
    # (ground_truth, **options) -> problem or None; called by :meth:`problem`
    check_ground_truth: Callable[..., str | None] = any_ground_truth
    # (**options) -> the libraries whose work may not end, each as the function (``module:name``)
    # that imports and warms it. With any, answers are graded in processes that can be killed.
    libraries: Callable[..., tuple[str, ...]] = no_libraries
    # (ground_truth, **options) -> a remark on one that is graded in a special way, or None
    note_ground_truth: Callable[..., str | None] = any_ground_truth

    def problem(self, ground_truth: Any, **options: Any) -> str | None:
        """Return why no answer could be right for a ground truth; None where one could.

        A check that fails is such a reason.
        """
        try:
            return self.check_ground_truth(ground_truth, **options)
        except Exception as error:
            return f"the check of ground truths failed on it ({type(error).__name__}: {error})"

    def __call__(
        self,
        response: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Score:
        return self.score(response, ground_truth, extra_info or {}, **options)
