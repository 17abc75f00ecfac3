"""Running a coroutine on the driver's event loop while the driver itself waits for something else."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any


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
