"""Grading one answer, and where that happens."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from core.rewards.custom import CustomFunction
from core.types import Score, ScoreStatus
from reward_scores import Scorer, scorer_for


@dataclass(frozen=True)
class Job:
    """One answer to grade: all that a worker needs, as plain data."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """The scorer gave no verdict."""

    status: ScoreStatus
    detail: str


class Grader:
    """Picks the scorer of a job and calls it with the configured options."""

    def __init__(self, reward_kwargs: Mapping[str, Any] | None = None, custom: CustomFunction | None = None):
        self.reward_kwargs = {name: dict(options or {}) for name, options in (reward_kwargs or {}).items()}
        self.custom = custom

    def scorer(self, data_source: str) -> Scorer:
        """Raises UnknownDataSource where neither the table nor a custom function covers it."""
        return self.custom.scorer(data_source) if self.custom else scorer_for(data_source)

    def options(self, scorer: Scorer) -> dict[str, Any]:
        return self.reward_kwargs.get(scorer.name, {})

    def __call__(self, job: Job) -> Any:
        """A Score, or an awaitable of one where the user's function is asynchronous."""
        scorer = self.scorer(job.data_source)
        return scorer(job.response, job.ground_truth, job.extra_info, **self.options(scorer))


class Executor(Protocol):
    """Where jobs are graded: the place of a pool.

    :class:`InProcess` trusts the scorers. A pool of processes that can be killed takes its place by keeping these two
    methods and answering ``Failure(ScoreStatus.TIMEOUT, ...)`` for a worker that missed its deadline.
    """

    async def run(self, job: Job) -> Score | Failure: ...

    def close(self) -> None: ...


class InProcess:
    """Grades in this process, one job after the other."""

    def __init__(self, grader: Grader):
        self.grader = grader

    async def run(self, job: Job) -> Score | Failure:
        try:
            result = self.grader(job)
            return await result if inspect.isawaitable(result) else result
        except Exception:  # a scorer may fail in any way; that is a status, and on_error says what follows from it
            return Failure(ScoreStatus.CRASH, traceback.format_exc())

    def close(self) -> None:
        """Nothing to stop."""
