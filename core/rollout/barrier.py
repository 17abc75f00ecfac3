"""A barrier for tools and scorers, which makes a run with an engine in this process repeat exactly.

Results of filtered groups and of tools decide what is generated next. Which samples decode together
decides the last bits of their log-probs. So the engine awaits :meth:`Barrier.settled` before each
step of decoding: how long a tool or a scorer takes then changes nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Barrier:
    """Runs tools and scorers. Results of a kind in ``holds`` are returned together.

    They are returned when no job of a held kind is outstanding.
    """

    def __init__(self) -> None:
        self.holds: frozenset[str] = frozenset()  # of "tools" and "scores"
        self._round: list[asyncio.Task] = []  # outstanding jobs, and those that wait for them
        self._round_ended = asyncio.Event()
        self._results_returned = False  # since the last call of settled

    async def run(self, kind: str, job: Callable[[], Awaitable[Any]]) -> Any:
        """Return what the job returns; ``kind`` is tools or scores."""
        if kind not in self.holds:
            return await job()
        task = asyncio.ensure_future(job())
        self._round.append(task)
        task.add_done_callback(self._end_round)
        try:
            await self._round_ended.wait()  # an event wakes its waiters in their order
        except asyncio.CancelledError:
            task.cancel()
            raise
        return await task

    def _end_round(self, _: asyncio.Task) -> None:
        """Begin a new round if all jobs of this one are done."""
        if all(task.done() for task in self._round):
            self._round_ended.set()
            self._round = []
            self._round_ended = asyncio.Event()
            self._results_returned = True

    async def settled(self) -> bool:
        """Wait until no job is outstanding. Return whether results came since the last call."""
        while self._round:
            await asyncio.wait(self._round)
        results_returned = self._results_returned
        self._results_returned = False
        return results_returned
