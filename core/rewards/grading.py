"""What a job is, which scorer grades it, and how it is graded in this process.

Processes that can be killed are :mod:`core.rewards.pool`'s; the choice between the two is a reward manager's
(:mod:`core.rewards.managers`).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from core.errors import WorkersLost
from core.rewards.custom import CustomFunction, as_score
from reward_scores import Scorer, scorer_for
from reward_scores.score import Score, ScoreStatus


@dataclass(frozen=True)
class Job:
    """One answer to grade: all that a grader needs, as plain data."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """The reason why an answer has no score."""

    status: ScoreStatus
    detail: str


class Scorers:
    """The scorers of a run and their options: the table of :mod:`reward_scores`, or the user's function for all."""

    def __init__(self, reward_kwargs: Mapping[str, Any] | None = None, custom: CustomFunction | None = None):
        self.reward_kwargs = {name: dict(options or {}) for name, options in (reward_kwargs or {}).items()}
        self.custom = custom

    def scorer(self, data_source: str) -> Scorer:
        """Return the scorer of a data source. Raises UnknownDataSource where there is none."""
        return self.custom.scorer(data_source) if self.custom else scorer_for(data_source)

    def options(self, scorer: Scorer) -> dict[str, Any]:
        return self.reward_kwargs.get(scorer.name, {})

    def libraries(self, data_source: str) -> tuple[str, ...]:
        """Return the libraries of a data source's scorer whose work may not end. Raises UnknownDataSource."""
        scorer = self.scorer(data_source)
        return tuple(scorer.libraries(**self.options(scorer)))

    def __call__(self, job: Job) -> Any:
        """Return what the scorer returned, for :func:`as_score` to read; an awaitable of it from an async function."""
        scorer = self.scorer(job.data_source)
        return scorer(job.response, job.ground_truth, job.extra_info, **self.options(scorer))


class RewardManager(Protocol):
    """Grades jobs: in this process (:class:`InProcess`), in others (:class:`core.rewards.pool.Pool`), or in both.

    ``run`` returns a :class:`Failure` where there is no score. It may be called from several event loops, one after
    the other.
    """

    async def run(self, job: Job) -> Score | Failure: ...

    def close(self) -> None: ...


async def as_result(grade: Callable[[Job], Awaitable[Any]], job: Job) -> Score | Failure:
    """Call code that may fail in any way, a scorer's or a user's, and read its result; what it raises is a crash."""
    try:
        result = await grade(job)
        return result if isinstance(result, Failure) else as_score(result)
    except WorkersLost:  # of a pool that it uses: never the fault of an answer
        raise
    except Exception:
        return Failure(ScoreStatus.CRASH, traceback.format_exc())


class InProcess:
    """Grades in this process, one job after the other. What a library may not finish goes to ``pool``, if given."""

    def __init__(self, scorers: Scorers, pool: RewardManager | None = None):
        self.scorers, self.pool = scorers, pool

    async def run(self, job: Job) -> Score | Failure:
        return await as_result(self._grade, job)

    async def _grade(self, job: Job) -> Any:
        if self.pool is not None and self.scorers.libraries(job.data_source):
            return await self.pool.run(job)
        result = self.scorers(job)
        return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
