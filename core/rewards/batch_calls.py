"""Joining single items into calls of a function that takes many, and what a reward model is called with.

The model itself is :mod:`core.extensions.judge.reward_model`; where it runs is decided by
:attr:`core.cluster.workers.Workers.reward_model`. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Answer:
    """An answer as a reward model may read it: a chat and a text, or the policy's own token ids."""

    messages: tuple[Mapping[str, Any], ...]
    response: str  # what the policy wrote, and nothing else
    token_ids: tuple[int, ...]  # prompt and response
    ground_truth: Any = None  # for a judge that compares with it


@dataclass(frozen=True)
class ModelScore:
    """The model's number, or why there is none."""

    value: float = math.nan
    cut: bool = False  # the answer was longer than reward_model.max_length
    error: str = ""
    timed_out: bool = False  # the error is that there was no reply in time
    notes: Mapping[str, float] = field(default_factory=dict)  # of a judge: further parts of the score

    @property
    def parts(self) -> dict[str, float]:
        """The parts of a score that keep the number, and whether the model did not see the end of the answer."""
        return {"model": self.value, "model_cut": float(self.cut), **self.notes}


# The reward model as the reward layer calls it: with all the answers that wait at once
RewardModelCall = Callable[[Sequence[Answer]], Sequence[ModelScore] | Awaitable[Sequence[ModelScore]]]
