"""What a job is, which scorer grades it, and how it is graded in this process.

Processes that can be killed are :mod:`core.rewards.grader_pool`'s; the choice between the two is a reward manager's
(:mod:`core.rewards.managers`).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from core.errors import WorkersLost
from core.rewards.custom import CustomFunction
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
    """Grades jobs: here (:class:`InProcess`), in other processes (:class:`core.rewards.grader_pool.Pool`), or in both.

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


def as_scores(result: Any, count: int) -> list[Score]:
    """Read what a batched function returned: ``count`` results, each in a form that :func:`as_score` reads."""
    if isinstance(result, Mapping | str) or not hasattr(result, "__len__") or len(result) != count:
        had = f"{len(result)} results" if hasattr(result, "__len__") else type(result).__name__
        raise ValueError(f"a batched reward function must return one result an answer: got {had} for {count} answers")
    return [as_score(one) for one in result]


def as_score(result: Any) -> Score:
    """Read a number, a dict with ``score``, or a :class:`Score`, as a Score.

    Of a dict, ``pred`` is the answer that was read, other numbers (``acc`` among them) are parts, and texts are left
    out. The status is OK where ``acc`` (the score itself, unless given) is above 0. Raises TypeError or ValueError for
    anything else, non-finite numbers included.
    """
    if isinstance(result, Score):
        parts = {name: _number(part, name) for name, part in result.parts.items()}
        return dataclasses.replace(result, value=_number(result.value), parts=parts)
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ValueError(f"a reward function's dict needs the key 'score', it has {sorted(map(str, given))}")
    value, pred = _number(given["score"]), given.get("pred")
    parts = {
        str(name): _number(part, name)
        for name, part in given.items()
        if name not in ("score", "pred") and part is not None and not isinstance(part, str)
    }
    status = ScoreStatus.OK if parts.get("acc", value) > 0 else ScoreStatus.WRONG
    return Score(value, parts, status, pred=None if pred is None else str(pred))


def _number(value: Any, name: Any = "score") -> float:
    scalar = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if not isinstance(scalar, (int, float)):
        raise TypeError(f"a reward function's {name!r} must be a number, got {type(value).__name__}: {value!r:.200}")
    if not math.isfinite(scalar):
        raise ValueError(f"a reward function's {name!r} must be finite, got {scalar}")
    return float(scalar)
