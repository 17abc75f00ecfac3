"""Calls of many tasks joined into one: for models that take a batch."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


class BatchCalls:
    """Calls a function of a list, one call at a time.

    Each call has the items that arrived during the call before.
    """

    def __init__(self, function: Callable[[list[Any]], Any]):
        self.function = function
        self._waiting: list[tuple[Any, asyncio.Future]] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: Any) -> Any:
        """Return the result of one item, or raise what its call raised."""
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        self._waiting.append((item, result))
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())
        return await result

    async def _run(self) -> None:
        # Items that arrive in the same turn of the event loop join the first call
        await asyncio.sleep(0)
        while True:
            batch = [(item, future) for item, future in self._waiting if not future.done()]
            self._waiting = []
            if not batch:
                return
            try:
                results = self.function([item for item, _ in batch])
                if inspect.isawaitable(results):
                    results = await results
                results = list(results)
                if len(results) != len(batch):
                    raise ValueError(f"{len(results)} results for {len(batch)} items")
            except Exception as error:  # every caller gets it; the next call goes on
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # the caller was cancelled
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
