"""A barrier that hands results out together, so that a run with an engine in this process repeats to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Barrier:
    """Hands results out together, in the order of their jobs, once none is outstanding.

    ``run_job`` is awaited with each job: a reward manager's or a judge's ``run``, or what calls tools. Results arrive
    in an order that chance decides. Where they decide what is generated next (filtered groups, turns after a tool), an
    engine that decodes in this process awaits :meth:`settled` before each step: which samples decode together, and with
    it every last bit, is then the same in every run. The price is that decoding waits for the slowest result.
    """

    def __init__(self, run_job: Callable[[Any], Awaitable[Any]]):
        self.run_job = run_job
        self._round: list[tuple[asyncio.Task, asyncio.Future]] = []
        self._open = 0
        self._news = False  # results were handed out since the last call of settled

    async def run(self, job: Any) -> Any:
        loop = asyncio.get_running_loop()
        task, handed_out = loop.create_task(self.run_job(job)), loop.create_future()
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
