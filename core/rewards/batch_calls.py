"""Joins single items into calls of a function that takes many: a batched reward function, a reward model.

A call never waits until it is full: it starts as soon as one may run, with the items that wait at that moment.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any


class BatchCalls:
    """Calls ``function`` with lists of items, at most ``at_once`` calls at a time.

    What arrives while all calls run goes into the next one. ``function`` returns one result an item; what it raises
    is raised for every item of the list.
    """

    def __init__(self, function: Callable[[list[Any]], Sequence[Any] | Awaitable[Sequence[Any]]], at_once: int = 1):
        self.function, self.at_once = function, at_once
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
        await asyncio.sleep(0)  # lets the items that arrive in the same turn of the event loop join this call
        while batch := [one for one in self._waiting if not one[1].done()]:
            self._waiting = []
            try:
                results = self.function([item for item, _ in batch])
                if inspect.isawaitable(results):
                    results = await results
            except Exception as error:  # it is handed to everybody who waits
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():  # it is where the caller was cancelled
                    settle = future.set_exception if isinstance(result, Exception) else future.set_result
                    settle(result)
