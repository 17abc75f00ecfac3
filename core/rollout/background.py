"""Running a coroutine on the driver's event loop while the driver itself waits for something else."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any

from core.rollout.collect import CollectState
from core.tracking.step_time import BusyClock
from core.types import StepMetrics


class Background:
    """A coroutine on ``runner``'s loop in a thread of its own. Until it has ended nobody else may use the runner.

    Example::

        ahead = Background(runner, collect_ahead(...))
        try:
            update()
            state = ahead.result()
        finally:
            ahead.close()
    """

    def __init__(self, runner: asyncio.Runner, work: Coroutine[Any, Any, Any]):
        self._loop, self._work = runner.get_loop(), work
        self._task: asyncio.Task | None = None
        self._given_up = False
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._future = self._thread.submit(runner.run, self._run())

    async def _run(self) -> Any:
        self._task = asyncio.current_task()
        if self._given_up:
            self._work.close()
            raise asyncio.CancelledError
        return await self._work

    def result(self) -> Any:
        """Wait for the end; return or raise what the coroutine did."""
        return self._future.result()

    def close(self) -> None:
        """Cancel what is not done yet and wait until it has ended. A second call does nothing."""
        if not self._future.done():
            self._loop.call_soon_threadsafe(self._give_up)
        concurrent.futures.wait([self._future])
        self._thread.shutdown()

    def _give_up(self) -> None:
        self._given_up = True
        if self._task is not None:
            self._task.cancel()


class Ahead:
    """Answers the next step's first prompts while a step trains (``trainer.max_staleness=1``).

    Where engine and learner cannot work at the same time (in one process, on one GPU) :meth:`start` itself waits, with
    the same outcome. As a context manager it cancels what is left when a step fails.
    """

    def __init__(self, runner: asyncio.Runner, clock: BusyClock, *, overlaps: bool):
        self.runner, self.clock, self.overlaps = runner, clock, overlaps
        self._state: CollectState | None = None
        self._background: Background | None = None

    def start(self, work: Coroutine[Any, Any, CollectState] | None, metrics: StepMetrics) -> None:
        """Begin the work of a step, if there is any, and add the seconds of what was collected for the step itself."""
        self._state = None
        if work is not None and not self.overlaps:
            with metrics.time("gen_ahead"):
                self._state = self.runner.run(work)
        metrics.add({f"timing_s/{name}": seconds for name, seconds in self.clock.take().items()})
        if work is not None and self.overlaps:
            self._background = Background(self.runner, work)

    def result(self, metrics: StepMetrics) -> CollectState | None:
        """Return the state to go on from, complete with the answers, or None where there was no work."""
        if self._background is not None:
            with metrics.time("wait_ahead"):
                self._state = self._background.result()
            self.close()
            hidden = sum(self.clock.take().values()) - metrics.values["timing_s/wait_ahead"]
            metrics.add({"timing_s/hidden_ahead": max(0.0, hidden)})
        return self._state

    def close(self) -> None:
        """Cancel what is not done yet. A second call does nothing."""
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
