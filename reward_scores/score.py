"""The result of a scorer. Nothing here imports the rest of the repository, so the scorers can be used alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


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
