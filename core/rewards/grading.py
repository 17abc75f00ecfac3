"""Grading one answer, and where that happens."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.rewards.custom import CustomFunction
from reward_scores import Scorer, scorer_for
from reward_scores.score import Score, ScoreStatus


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

    def libraries(self, data_source: str) -> tuple[str, ...]:
        """What the scorer of a data source calls whose work may not end; see :class:`reward_scores.scorer.Scorer`.

        Raises UnknownDataSource.
        """
        scorer = self.scorer(data_source)
        return tuple(scorer.libraries(**self.options(scorer)))

    def __call__(self, job: Job) -> Any:
        """A Score, or an awaitable of one where the user's function is asynchronous."""
        scorer = self.scorer(job.data_source)
        return scorer(job.response, job.ground_truth, job.extra_info, **self.options(scorer))

    def batch(self, jobs: Sequence[Job]) -> list[Score] | Awaitable[list[Score]]:
        """The scores of several jobs by one call of the user's function, which must be a batched one."""
        return self.custom.score_all(
            [job.data_source for job in jobs],
            [job.response for job in jobs],
            [job.ground_truth for job in jobs],
            [job.extra_info for job in jobs],
        )


class Executor(Protocol):
    """Where jobs are graded, and in what company: what a reward manager is.

    :class:`InProcess` trusts the scorers; :class:`core.rewards.pool.Pool` does not. ``run`` answers a
    :class:`Failure` where there is no verdict, and may be called from several event loops, one after the other.
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
