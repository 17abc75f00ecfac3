"""Reward managers: which process grades an answer (``reward_model.reward_manager``), and in what order results appear.

The processes themselves are :mod:`core.rewards.pool`'s.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core.config.plugins import load_object
from core.errors import InputError, WorkersLost
from core.rewards.custom import as_score, users_code, without_scheme
from core.rewards.grading import Failure, InProcess, Job, RewardManager, Scorers
from core.rewards.pool import Pool
from reward_scores import UnknownDataSource
from reward_scores.score import Score, ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import RewardModelConfig


class Naive:
    """Grades in this process, one answer after the other; where a scorer's library may not end, in a pool instead."""

    def __init__(self, scorers: Scorers, pool: Pool):
        self.pool, self.in_process = pool, InProcess(scorers)

    async def run(self, job: Job) -> Score | Failure:
        try:
            may_not_end = bool(self.in_process.scorers.libraries(job.data_source))
        except UnknownDataSource:  # grading in this process reports it
            may_not_end = False
        return await (self.pool if may_not_end else self.in_process).run(job)

    def close(self) -> None:
        self.pool.close()


class UsersOwn:
    """A user's manager: what it returns is read like a reward function's result, and what it raises is a crash."""

    def __init__(self, manager: Any):
        self.manager = manager

    async def run(self, job: Job) -> Score | Failure:
        try:
            result = await self.manager.run(job)
            return result if isinstance(result, Failure) else as_score(result)
        except WorkersLost:  # of a pool that the manager uses: never the fault of an answer
            raise
        except Exception:  # a user's code may fail in any way; that is a status
            return Failure(ScoreStatus.CRASH, traceback.format_exc())

    def close(self) -> None:
        self.manager.close()


class Barrier:
    """Hands results out together, in the order of their jobs, once none is outstanding.

    A pool's results arrive in an order that chance decides. Where they decide what is generated next (filtered
    groups), an engine that decodes in this process awaits :meth:`settled` before each step: which samples decode
    together, and with it every last bit, is then the same in every run. The price is that decoding waits for scoring.
    """

    def __init__(self, inner: RewardManager):
        self.inner = inner
        self._wave: list[tuple[asyncio.Task, asyncio.Future]] = []
        self._open = 0
        self._news = False  # results were handed out since the last call of settled

    async def run(self, job: Job) -> Score | Failure:
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
        """Wait until no result is outstanding. Return whether any was handed out since the last call."""
        while self._wave:
            await asyncio.wait([task for task, _ in self._wave])
        news, self._news = self._news, False
        return news

    def close(self) -> None:
        self.inner.close()


def _pool(reward: RewardModelConfig, scorers: Scorers) -> Pool:
    limits = {name: getattr(reward, name) for name in ("num_workers", "timeout_s", "memory_limit_mb")}
    return Pool(scorers, **limits)


MANAGERS: dict[str, Callable[[RewardModelConfig, Scorers], RewardManager]] = {
    "naive": lambda reward, scorers: Naive(scorers, _pool(reward, scorers)),
    "batch": _pool,  # the function is then a batched one, which a pool calls with all the answers that wait
    "prime": _pool,
    "dapo": _pool,  # the overlong penalty, the other half of that manager, is the trainer's shape_reward
}


def make_manager(reward: RewardModelConfig, scorers: Scorers) -> RewardManager:
    """Make the manager that ``reward_model`` names: one of the table, or with ``source=importlib`` the user's own.

    A user's is a class (or function) ``module.name`` of ``module.path``. It is called with ``reward_model`` and the
    :class:`Scorers` of the run (so that it can use an :class:`InProcess` or a :class:`Pool`), and what it returns
    has ``async run(job)`` and ``close()``. Raises InputError.
    """
    if reward.source == "register":
        return MANAGERS[reward.reward_manager](reward, scorers)
    where = without_scheme(reward.module.path or "")
    with users_code(f"reward_model.module.path={where}", "loading it"):
        made = load_object(f"{where}:{reward.module.name or ''}", "reward_model.module.path")(reward, scorers)
    if lacks := [name for name in ("run", "close") if not callable(getattr(made, name, None))]:
        raise InputError(f"reward_model.module.name={reward.module.name}: has no {' and no '.join(lacks)}()")
    return UsersOwn(made)
