"""Join requests that wait into calls of a function that takes many: of a reward model, of a retriever.

A call takes what arrived during the one before: an idle function answers at once, a busy one in large batches.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any


class QueueFull(Exception):
    """More items wait than may."""


@dataclass(eq=False)
class _Request:
    items: Sequence[Any]
    key: Any
    answer: asyncio.Future


class RequestBatcher:
    """Calls ``function(items, key)``, one call at a time, with the items of several requests of one key.

    ``function`` returns one result an item; what it raises is raised for every request of the call. A call has at most
    ``max_batch`` items, except for a larger request. More than ``max_waiting`` items in the queue are QueueFull.
    """

    def __init__(
        self,
        function: Callable[[list[Any], Any], Sequence[Any] | Awaitable[Sequence[Any]]],
        *,
        max_batch: int | None = None,
        max_waiting: int | None = None,
    ):
        self.function, self.max_batch, self.max_waiting = function, max_batch, max_waiting
        self._queue: list[_Request] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Items in the queue."""
        return sum(len(request.items) for request in self._queue)

    async def submit(self, items: Sequence[Any], key: Any = None) -> list[Any]:
        """Return the results of the items, all of them of one call."""
        waiting = self.waiting
        if self.max_waiting is not None and waiting and waiting + len(items) > self.max_waiting:
            raise QueueFull(f"{waiting} items wait, at most {self.max_waiting} may")
        loop = asyncio.get_running_loop()
        request = _Request(items, key, loop.create_future())
        self._queue.append(request)
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())
        return await request.answer

    async def close(self) -> None:
        """Wait until the queue is empty."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        await asyncio.sleep(0)  # lets the items that arrive in the same turn of the event loop join this call
        while batch := self._next_batch():
            try:
                items = [item for request in batch for item in request.items]
                results = self.function(items, batch[0].key)
                if inspect.isawaitable(results):
                    results = await results
                if len(results) != len(items):
                    raise ValueError(f"{len(results)} results for {len(items)} items")
            except Exception as error:  # every request of the batch gets it; the next batch goes on
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            remaining = iter(results)
            for request in batch:
                own = [next(remaining) for _ in request.items]
                if not request.answer.done():  # it is where the caller was cancelled
                    request.answer.set_result(own)

    def _next_batch(self) -> list[_Request]:
        """Return the oldest request and those of its key behind it that fit. Requests whose caller has gone go."""
        waiting, batch, size = [one for one in self._queue if not one.answer.done()], [], 0
        for request in waiting:
            fits = self.max_batch is None or size + len(request.items) <= self.max_batch
            if not batch or (fits and request.key == batch[0].key):
                batch.append(request)
                size += len(request.items)
        self._queue = [one for one in waiting if one not in batch]
        return batch
