"""An engine without a model: what it answers and how long that takes is scripted.

Time is virtual. A request that starts at ``t`` with latency ``d`` ends at ``t + d``; the clock
jumps from one end to the next as soon as those who await have had their turns, so that the order of
ends is the script's alone.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from core.data.draw_order import derive_seed
from core.data.vocabulary import end_ids
from core.engines.engine import Generation, SampleRequest, StopRule
from core.types import Stop, Trajectory

# Of the event loop between two ends: consumers that await one another react within one instant
TURNS = 16
LOGPROB = -1.0  # of every token


class ScriptedEngine:
    """Satisfies :class:`core.engines.engine.RolloutEngine` in everything but having weights.

    ``respond(request)`` gives the response as token ids, or as text, to which the end-of-sequence
    id is appended; the request's limits and stops cut it as they would cut a model's. What it
    raises, ``sample`` raises. ``latency(request, tokens)`` gives virtual seconds (default: one a
    token).
    """

    def __init__(
        self,
        tokenizer: Any,
        respond: Callable[[SampleRequest], Sequence[int] | str],
        latency: Callable[[SampleRequest, int], float] | None = None,
    ):
        self.tokenizer, self.respond = tokenizer, respond
        self.latency = latency or (lambda request, tokens: float(tokens))
        self.eos, self.policy_version, self.now = end_ids(tokenizer), 0, 0.0
        self.requests: list[SampleRequest] = []
        # A heap, the next to end first
        self._running: list[tuple[float, int, asyncio.Future, Trajectory]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking = False

    async def sample(self, request: SampleRequest) -> Trajectory:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a former event loop ended under its requests
            self._loop, self._running, self._ticking = loop, [], False
        answer, future = self._response(request), loop.create_future()
        self.requests.append(request)
        end = self.now + self.latency(request, len(answer.response_ids))
        heapq.heappush(self._running, (end, len(self.requests), future, answer))
        self._tick_on()
        return await future

    def _response(self, request: SampleRequest) -> Trajectory:
        script = self.respond(request)
        if isinstance(script, str):
            script = [*self.tokenizer.encode(script, add_special_tokens=False), *sorted(self.eos)]
        rule = StopRule(request.sampling, self.eos, self.tokenizer)
        row = Generation(request, rule, self.policy_version)
        for token in script:  # as if truncation had kept that token alone
            kept = [int(token)] if request.sampling.records_kept else None
            if row.write(int(token), LOGPROB, kept):
                break
        row.stop = row.stop or Stop.EOS
        return row.trajectory()

    def _drop_aborted(self) -> None:
        while self._running and self._running[0][2].done():
            heapq.heappop(self._running)

    def _tick_on(self) -> None:
        """Keep the clock going while anything will end."""
        self._drop_aborted()
        if self._running and not self._ticking:
            self._ticking = True
            self._loop.call_soon(self._tick, self._loop, TURNS)

    def _tick(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        if loop is not self._loop:
            return
        if turns:
            loop.call_soon(self._tick, loop, turns - 1)
            return
        self._ticking = False
        self._drop_aborted()
        if self._running:
            self.now, _, future, answer = heapq.heappop(self._running)
            future.set_result(answer)
        self._tick_on()

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes any weights. Raises RuntimeError where requests are in flight."""
        if (
            self._loop is not None
            and not self._loop.is_closed()
            and not all(one[2].done() for one in self._running)
        ):
            raise RuntimeError("update_weights with requests in flight: await or cancel them first")
        self.policy_version = version

    def sleep(self) -> None:
        """Has nothing to free."""

    def close(self) -> None:
        """Has nothing to free."""


def random_latency(seed: int, mean: float = 1.0) -> Callable[[SampleRequest, int], float]:
    """Exponential latencies, a function of ``seed`` and the request's own seed: not of the order of
    arrival."""

    def latency(request: SampleRequest, tokens: int) -> float:
        return float(
            np.random.default_rng(derive_seed("latency", seed, request.seed)).exponential(mean)
        )

    return latency
