"""Barriers that make a run repeat to the bit where an engine decodes in this process.

Which samples decode together decides every last bit of their log-probs. Where results from outside decide what is begun
next (scores of filtered groups, tools), the engine therefore awaits them before each of its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from core.engines.in_process_engine import InProcessEngine

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.engines import RolloutEngine
    from core.rewards import RewardLayer


class Barrier:
    """Hands results out together, in the order of their jobs, once none is outstanding.

    ``inner`` has ``async run(job)``: a reward manager, or what calls tools. Its results arrive in an order that chance
    decides. Where they decide what is generated next (filtered groups, turns after a tool), an engine that decodes in
    this process awaits :meth:`settled` before each step: which samples decode together, and with it every last bit, is
    then the same in every run. The price is that decoding waits for the slowest result.
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self._round: list[tuple[asyncio.Task, asyncio.Future]] = []
        self._open = 0
        self._news = False  # results were handed out since the last call of settled

    async def run(self, job: Any) -> Any:
        loop = asyncio.get_running_loop()
        task, handed_out = loop.create_task(self.inner.run(job)), loop.create_future()
        self._round.append((task, handed_out))
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
        results, self._round = self._round, []
        self._news = True
        for task, handed_out in results:
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
        while self._round:
            await asyncio.wait([task for task, _ in self._round])
        news, self._news = self._news, False
        return news

    def close(self) -> None:
        self.inner.close()


class ToolCalls:
    """Awaits tools, each on its own; after :meth:`add_barrier` together, in the order of the calls."""

    def __init__(self) -> None:
        self._jobs: _Jobs | Barrier = _Jobs()

    async def __call__(self, job: Callable[[], Awaitable[Any]]) -> Any:
        return await self._jobs.run(job)

    def add_barrier(self) -> Callable[[], Awaitable[bool]]:
        """Hand answers out together from now on, and return what an engine in this process awaits before each step."""
        self._jobs = barrier = Barrier(self._jobs)
        return barrier.settled


class _Jobs:
    async def run(self, job: Callable[[], Awaitable[Any]]) -> Any:
        return await job()


def make_repeatable(
    config: Config, engine: RolloutEngine, reward: RewardLayer, tool_calls: ToolCalls, *, episodes: bool
) -> None:
    """Have an engine in this process await scores where they decide what is begun next, and tools where
    ``multi_turn.repeatable`` is set. Other engines are left alone."""
    if not isinstance(engine, InProcessEngine):
        return
    data, barriers = config.data, []
    in_flight = data.gen_batch_size or data.train_batch_size
    scores_decide = config.algorithm.filter_groups.enable or in_flight < data.train_batch_size
    # A function of lists scores between rounds, when nothing decodes
    if scores_decide and not (reward.in_process or reward.batched):
        reward.manager = barrier = Barrier(reward.manager)
        barriers.append(barrier.settled)
        if reward.judge is not None:
            reward.judging = judging = Barrier(reward.judge)
            barriers.append(judging.settled)
    if episodes and config.actor_rollout_ref.rollout.multi_turn.repeatable:
        barriers.append(tool_calls.add_barrier())
    engine.before_step = _all_of(barriers)


def _all_of(barriers: list[Callable[[], Awaitable[bool]]]) -> Callable[[], Awaitable[bool]] | None:
    """Return one barrier that awaits them all and reports whether any had news."""

    async def wait() -> bool:
        return any([await barrier() for barrier in barriers])

    return wait if barriers else None
