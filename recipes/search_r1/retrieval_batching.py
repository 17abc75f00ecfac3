"""Answer the searches of many requests together: a bounded queue before one thread that owns the retriever.

The server puts it before its retriever. Nothing of HTTP is here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from recipes.search_r1.index.passages import Passage, RetrievalError, Retriever


class Busy(Exception):
    """The queue is full."""


@dataclass(eq=False)
class _Request:
    queries: list[str]
    topk: int
    answer: asyncio.Future[list[list[Passage]]]


class Batcher:
    """A queue that joins waiting requests with the same ``topk`` into batches of at most ``max_batch`` queries.

    A batch is what waited while the one before was searched: an idle server answers at once, a busy one in large
    batches. Requests with another ``topk`` go into another batch, since an approximate index may find other passages
    for another number: an answer must not depend on the requests beside it.

    Args:
        max_batch: queries searched together. A larger request is a batch of its own.
        max_waiting: queries in the queue before :class:`Busy` is raised.
    """

    def __init__(self, retriever: Retriever, max_batch: int = 256, max_waiting: int = 4096):
        self._retriever, self._max_batch, self._max_waiting = retriever, max_batch, max_waiting
        self._waiting: deque[_Request] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retriever")
        self._work: asyncio.Task[None] | None = None
        self.batches = self.queries = 0

    @property
    def waiting(self) -> int:
        """Queries in the queue."""
        return sum(len(request.queries) for request in self._waiting)

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Search with the next batch. Raises Busy at once where the queue is full, and the retriever's errors."""
        waiting = self.waiting
        if waiting and waiting + len(queries) > self._max_waiting:
            raise Busy(f"{waiting} queries wait, at most {self._max_waiting} may")
        request = _Request(queries, topk, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._answer_all())
        return await request.answer

    async def close(self) -> None:
        if self._work is not None:
            await self._work
        self._thread.shutdown()

    async def _answer_all(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            if not batch:
                continue
            queries = [query for request in batch for query in request.queries]
            try:
                found = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._retriever.retrieve, queries, batch[0].topk
                )
                if len(found) != len(queries):
                    raise RetrievalError(f"the retriever answered {len(found)} of {len(queries)} queries")
            except Exception as error:  # every request of the batch gets it; the next batch goes on
                for request in batch:
                    _settle(request, error=error)
                continue
            self.batches, self.queries = self.batches + 1, self.queries + len(queries)
            answers = iter(found)
            for request in batch:
                _settle(request, [next(answers) for _ in request.queries])

    def _next_batch(self) -> list[_Request]:
        """Return the oldest request and those behind it that fit, and drop requests whose caller has gone."""
        batch: list[_Request] = []
        later: deque[_Request] = deque()
        size = 0
        while self._waiting:
            request = self._waiting.popleft()
            if request.answer.done():
                continue
            fits = not batch or (request.topk == batch[0].topk and size + len(request.queries) <= self._max_batch)
            if fits:
                batch.append(request)
                size += len(request.queries)
            else:
                later.append(request)
        self._waiting = later
        return batch


def _settle(request: _Request, found: list[list[Passage]] | None = None, error: Exception | None = None) -> None:
    if request.answer.done():
        return
    if error is not None:
        request.answer.set_exception(error)
    else:
        request.answer.set_result(found)
