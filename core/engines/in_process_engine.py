"""The loop of engines that decode in this process, one step of all running generations at a time.

One task of the running event loop steps while requests are in flight and ends with the last of
them. It yields between steps, so that finished responses are scored while the others decode. There
are no threads and no timers: the consumers of requests alone decide the order of everything, and a
replay repeats it to the bit.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import nn

from core.engines.engine import Generation, RolloutEngine, SampleRequest
from core.types import Trajectory

log = logging.getLogger(__name__)

# Turns of the event loop after a response ended: its consumer, and those that it wakes, may request
# more
TURNS = 4
# Turns after scores from elsewhere came: more than all their effects can take
SETTLED_TURNS = 32


class InProcessEngine(RolloutEngine):
    """An engine that computes one step of all running generations at a time."""

    # Awaited before each step, so that consumers whose answers come from elsewhere are not
    # overtaken by the next step, and a replay stays exact. It returns whether some of those answers
    # came: their receivers may then request more.
    before_step: Callable[[], Awaitable[bool]] | None = None

    def __init__(
        self,
        tokenizer: Any,
        model: nn.Module,
        device: torch.device,
        max_length: int = sys.maxsize,
    ):
        super().__init__(tokenizer, model, device, max_length)
        # Requests that are awaited, in the order of their arrival
        self._requests: dict[Generation, None] = {}
        self._waiting: list[Generation] = []
        self._task: asyncio.Task | None = None

    async def sample(self, request: SampleRequest) -> Trajectory:
        generation = self._begin(request)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.get_loop() is not loop or self._task.done():
            self._drop_all()  # what a former event loop left behind
            self._task = loop.create_task(self._decode())
        generation.future = loop.create_future()
        self._waiting.append(generation)
        self._requests[generation] = None
        try:
            return await generation.future
        finally:
            del self._requests[generation]

    async def _decode(self) -> None:
        task = asyncio.current_task()
        turns = TURNS
        try:
            while True:
                await self._let_consumers_act(turns)
                self._waiting = _awaited(self._waiting)
                aborted = [each for each in self._running() if each.future.done()]
                if aborted:
                    self._drop(aborted)
                self._admit()
                if not self._running():
                    return
                finished = self._advance()
                for generation in _awaited(finished):
                    generation.future.set_result(generation.trajectory())
                turns = TURNS if finished else 1
        except Exception as error:
            live = self._live()
            for generation in live:
                generation.future.set_exception(error)
            if not live:  # nobody awaits an answer, and the fault must not end here unseen
                raise
        finally:
            if self._task is task:  # else another event loop has taken over
                self._drop_all()

    async def _let_consumers_act(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        while self.before_step is not None and await self.before_step():
            for _ in range(SETTLED_TURNS):
                await asyncio.sleep(0)

    def _in_flight(self) -> int:
        live = len(self._live())
        if not live:  # what a closed event loop left behind must not go on with other weights
            self._waiting = []
            self._drop(list(self._running()))
        return live

    def _live(self) -> list[Generation]:
        """Return the generations that are awaited on an event loop that still runs."""
        awaited = _awaited(list(self._requests))
        return [each for each in awaited if not each.future.get_loop().is_closed()]

    def _drop_all(self) -> None:
        for generation in self._live():
            generation.future.cancel()
        self._waiting = []
        self._task = None
        try:
            self._drop(list(self._running()))
        except Exception:  # of an engine that failed before: its first fault is the reason to show
            log.warning("requests could not be aborted", exc_info=True)

    def _cancel_all(self) -> None:
        task = self._task
        self._drop_all()
        if task is not None and not task.get_loop().is_closed():
            task.cancel()

    # -- what each engine does in its own way ----------------------------------------------------

    def _running(self) -> Sequence[Generation]:
        """Return the generations that take part in a step."""
        raise NotImplementedError

    def _admit(self) -> None:
        """Let those at the front of ``_waiting`` run that have room."""
        raise NotImplementedError

    def _advance(self) -> list[Generation]:
        """Take a step; return the generations that ended with it, which run no longer."""
        raise NotImplementedError

    def _drop(self, generations: list[Generation]) -> None:
        """Drop running generations."""
        raise NotImplementedError


def _awaited(generations: list[Generation]) -> list[Generation]:
    return [each for each in generations if not each.future.done()]
