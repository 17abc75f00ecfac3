"""Reward managers: who grades, where, and how many answers at a time (``reward_model.reward_manager``)."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from core.config.plugins import load_object
from core.errors import InputError, WorkersLost
from core.rewards.batch_calls import Together
from core.rewards.custom import as_score
from core.rewards.grading import Executor, Failure, Grader, InProcess, Job
from core.rewards.pool import Pool
from reward_scores import UnknownDataSource
from reward_scores.score import Score, ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import RewardModelConfig

Result = Score | Failure


class Naive:
    """Grades in this process, one answer after the other; what may not end goes to the workers of a pool instead."""

    def __init__(self, grader: Grader, pool: Pool):
        self.grader, self.pool = grader, pool
        self.in_process = InProcess(grader)

    async def run(self, job: Job) -> Result:
        return await (self.pool if self._may_not_end(job.data_source) else self.in_process).run(job)

    def _may_not_end(self, data_source: str) -> bool:
        try:
            return bool(self.grader.libraries(data_source))
        except UnknownDataSource:  # grading it says so
            return False

    def preload(self, libraries: Iterable[str]) -> None:
        self.pool.preload(libraries)

    @property
    def at_once(self) -> bool:
        """Whether no verdict comes from the pool, as far as is known."""
        return not self.pool.preloaded

    def close(self) -> None:
        self.pool.close()


class Batched:
    """One call of the user's function for all the answers that wait, in the workers of a pool.

    A call is made as soon as a worker is free for it; what arrives while all are busy goes into the next call.
    ``timeout_s`` is the time of a call. The answers of one that fails are graded again one by one, so that a bad
    answer costs its own verdict only.
    """

    def __init__(self, pool: Pool):
        self.pool = pool
        self._together = Together(self._grade, pool.num_workers)

    async def run(self, job: Job) -> Result:
        return await self._together(job)

    async def _grade(self, jobs: list[Job]) -> list[Result]:
        results = await self.pool.run_together(jobs)
        if len(jobs) > 1 and isinstance(results[0], Failure):
            return await asyncio.gather(*map(self.pool.run, jobs))
        return results

    def preload(self, libraries: Iterable[str]) -> None:
        self.pool.preload(libraries)

    def close(self) -> None:
        self.pool.close()


class UsersOwn:
    """A user's manager: what it returns is read like a reward function's result, what it raises is a crash."""

    def __init__(self, manager: Any):
        self.manager = manager

    async def run(self, job: Job) -> Result:
        try:
            result = await self.manager.run(job)
            return result if isinstance(result, Failure) else as_score(result)
        except WorkersLost:  # of a pool that the manager uses: not the answer's doing
            raise
        except Exception:  # a user's code may fail in any way; that is a status
            return Failure(ScoreStatus.CRASH, traceback.format_exc())

    def close(self) -> None:
        self.manager.close()


class InWaves:
    """Hands results out together, in the order of their jobs, once none is outstanding.

    In what order a pool's results come is chance. Where they decide what is generated next (filtered groups), an
    engine that decodes in this process waits for :meth:`settled` before each step: which samples decode together, and
    with it every last bit, is then the same in every run. The price is that decoding waits for scoring.
    """

    def __init__(self, inner: Executor):
        self.inner = inner
        self._wave: list[tuple[asyncio.Task, asyncio.Future]] = []
        self._open = 0
        self._news = False  # results were handed out since somebody last asked

    async def run(self, job: Job) -> Result:
        loop = asyncio.get_running_loop()
        task, handed_out = loop.create_task(self.inner.run(job)), loop.create_future()
        self._wave.append((task, handed_out))
        self._open += 1
        task.add_done_callback(self._hand_out)
        try:
            return await handed_out
        except asyncio.CancelledError:
            task.cancel()
            raise

    def _hand_out(self, _: asyncio.Task) -> None:
        self._open -= 1
        if self._open:
            return
        wave, self._wave = self._wave, []
        self._news = True
        for task, handed_out in wave:
            if handed_out.done():  # its sample was given up
                continue
            if task.cancelled():
                handed_out.cancel()
            elif error := task.exception():
                handed_out.set_exception(error)
            else:
                handed_out.set_result(task.result())

    async def settled(self) -> bool:
        """Waits until no result is outstanding; whether any was handed out since the last call."""
        while self._wave:
            await asyncio.wait([task for task, _ in self._wave])
        news, self._news = self._news, False
        return news

    def close(self) -> None:
        self.inner.close()


def _pool(reward: RewardModelConfig, grader: Grader) -> Pool:
    limits = {name: getattr(reward, name) for name in ("num_workers", "timeout_s", "memory_limit_mb")}
    return Pool(grader, **limits)


MANAGERS: dict[str, Callable[[RewardModelConfig, Grader], Executor]] = {
    "naive": lambda reward, grader: Naive(grader, _pool(reward, grader)),
    "batch": lambda reward, grader: Batched(_pool(reward, grader)),
    "prime": _pool,
    "dapo": _pool,  # the overlong penalty, the other half of that manager, is the trainer's shape_reward
}


def make_manager(reward: RewardModelConfig, grader: Grader) -> Executor:
    """The manager that ``reward_model`` names: one of ours, or with ``source=importlib`` the user's own.

    A user's is a class (or function) ``module.name`` of ``module.path``. It is called with ``reward_model`` and the
    :class:`Grader` of the run (so that it can put an :class:`InProcess` or a :class:`Pool` to use), and what it
    returns has ``async run(job)`` and ``close()``. Raises InputError.
    """
    if reward.source == "register":
        return MANAGERS[reward.reward_manager](reward, grader)
    where = (reward.module.path or "").removeprefix("file://").removeprefix("pkg://")
    try:
        made = load_object(f"{where}:{reward.module.name or ''}", "reward_model.module.path")(reward, grader)
    except InputError as error:
        raise InputError([str(error)]) from error
    except Exception as error:  # whatever the user's module raises is a problem of this key
        problem = f"reward_model.module.path={where}: loading it failed\n{traceback.format_exc(limit=-3).rstrip()}"
        raise InputError([problem]) from error
    lacks = [name for name in ("run", "close") if not callable(getattr(made, name, None))]
    if lacks:
        raise InputError([f"reward_model.module.name={reward.module.name}: has no {' and no '.join(lacks)}()"])
    return UsersOwn(made)
