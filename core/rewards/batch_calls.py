"""What waits goes together: one call for many items, as soon as there is room for a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any


class Together:
    """Hands items to ``call`` in lists, at most ``at_once`` calls at a time; what arrives meanwhile goes into the next.

    ``call`` returns a result an item. What it raises, every item of the list raises.
    """

    def __init__(self, call: Callable[[list[Any]], Awaitable[Sequence[Any]]], at_once: int = 1):
        self.call, self.at_once = call, at_once
        self._waiting: list[tuple[Any, asyncio.Future]] = []
        self._calls: set[asyncio.Task] = set()

    async def __call__(self, item: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._calls) < self.at_once:
            task = asyncio.ensure_future(self._run())
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # items that came together go together
        while batch := [one for one in self._waiting if not one[1].done()]:
            self._waiting = []
            try:
                results = await self.call([item for item, _ in batch])
            except Exception as error:  # who waits must hear of it
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # given up
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
