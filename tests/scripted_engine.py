"""An engine without a model: what it answers and how long that takes is scripted. For tests and simulations.

Time is virtual. A request that starts at ``t`` with latency ``d`` ends at ``t + d``; the clock jumps from one end
to the next as soon as those who await have had their turns, so that the order of ends is the script's alone, and
an hour of decoding takes milliseconds.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from core.data.draw_order import derive_seed
from core.engines import SampleRequest
from core.engines.in_process_engine import Row
from core.engines.sampling import StopRule, eos_ids
from core.types import Stop, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

TURNS = 16  # of the event loop between two ends: consumers that await one another react within one instant
LOGPROB = -1.0  # of every token


@dataclass
class Record:
    """What became of a request, in virtual time. ``end`` is None while it runs, ``start`` while it waits."""

    request: SampleRequest
    version: int
    submitted: float
    start: float | None = None
    end: float | None = None
    slot: int | None = None
    stop: Stop | None = None


class ScriptedEngine:
    """Satisfies :class:`core.engines.RolloutEngine` in everything but having weights.

    ``respond(request)`` gives the response as token ids, or as text, to which the end-of-sequence id is appended;
    the request's limits and stops cut it as they would cut a model's. Ids that end before any of those stop with
    ``Stop.EOS``. What it raises, ``sample`` raises. ``latency(request, tokens)`` gives virtual seconds (default:
    one a token); ``math.inf`` is a request that hangs until it is aborted. ``max_concurrency`` slots serve the
    requests in the order of arrival. Without a tokenizer the text of a response is its ids, separated by spaces.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        respond: Callable[[SampleRequest], Sequence[int] | str],
        latency: Callable[[SampleRequest, int], float] | None = None,
        *,
        max_concurrency: int | None = None,
    ):
        self.tokenizer = IdsAsText() if tokenizer is None else tokenizer
        self.eos = eos_ids(self.tokenizer)
        self.respond = respond
        self.latency = latency or (lambda request, tokens: float(tokens))
        self.max_concurrency = max_concurrency
        self.policy_version = 0
        self.now = 0.0
        self.records: list[Record] = []
        self.updates: list[int] = []  # the version of every update_weights
        self._free: list[int] = list(range(max_concurrency or 0))
        self._slots = max_concurrency or 0
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []  # a heap, the next to end first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking = False
        self._turns = 0
        self._closed = False

    async def sample(self, request: SampleRequest) -> Trajectory:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if not request.prompt_ids:
            raise ValueError("SampleRequest.prompt_ids is empty: a response needs at least one token to follow")
        self._follow_loop()
        record = Record(request, self.policy_version, self.now)
        ids, stop = self._response(request)
        own = _Request(len(self.records), record, ids, stop, asyncio.get_running_loop().create_future())
        self.records.append(record)
        self._waiting.append(own)
        self._start_waiting()
        try:
            return await own.future
        except asyncio.CancelledError:
            self._end(own, Stop.ABORT)
            raise

    def _response(self, request: SampleRequest) -> tuple[list[int], Stop]:
        script = self.respond(request)
        eos = self.eos
        if isinstance(script, str):
            script = [*self.tokenizer.encode(script, add_special_tokens=False), *sorted(eos)]
        rule, ids = StopRule(request.sampling, eos, self.tokenizer), []
        for token in script:
            ids.append(int(token))
            if (stop := rule.ended(ids)) is not None:
                return ids, stop
        return ids, Stop.EOS

    def _start_waiting(self) -> None:
        while self._waiting and (self._free or self.max_concurrency is None):
            own = self._waiting.pop(0)
            if not self._free:
                self._free.append(self._slots)
                self._slots += 1
            own.record.slot = heapq.heappop(self._free)
            own.record.start = self.now
            own.end = self.now + self.latency(own.record.request, len(own.ids))
            heapq.heappush(self._running, own)
        self._tick_on()

    def _end(self, own: _Request, stop: Stop) -> None:
        """Takes the request out, wherever it is, and lets the next one start. A second call does nothing."""
        if own.record.end is not None:
            return
        own.record.end, own.record.stop = self.now, stop
        if own in self._waiting:
            self._waiting.remove(own)
        else:
            self._running.remove(own)
            heapq.heapify(self._running)
            heapq.heappush(self._free, own.record.slot)
        self._start_waiting()

    def _follow_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._ticking = loop, False
            self._drop_all()  # a former event loop ended under them

    def _drop_all(self) -> None:
        for own in self._waiting + self._running:
            self._end(own, Stop.ABORT)
            if not own.future.get_loop().is_closed():
                own.future.cancel()

    def _tick_on(self) -> None:
        """Keeps the clock going while anything will end by itself."""
        ends = self._running and not math.isinf(self._running[0].end)
        if ends and not self._ticking and not self._loop.is_closed():
            self._ticking, self._turns = True, TURNS
            self._loop.call_soon(self._tick, self._loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            return
        if self._turns:
            self._turns -= 1
            loop.call_soon(self._tick, loop)
            return
        self._ticking = False
        if self._running and not math.isinf(self._running[0].end):  # else what it waited for was aborted
            own = self._running[0]
            self.now = own.end
            self._end(own, own.stop)
            if not own.future.done():
                own.future.set_result(self._trajectory(own))
        self._tick_on()

    def _trajectory(self, own: _Request) -> Trajectory:
        logprobs = [LOGPROB] * len(own.ids)
        request = own.record.request
        rule = StopRule(request.sampling, self.eos, self.tokenizer)
        return Row(request, rule, own.record.version, None, own.ids, logprobs, own.stop).trajectory()

    def in_flight(self) -> int:
        """Requests that run or wait, those of an event loop that was closed under them not counted."""
        if self._loop is not None and self._loop.is_closed():
            self._drop_all()
        return len(self._running) + len(self._waiting)

    def busy_time(self) -> list[float]:
        """Virtual seconds that each slot has worked, aborted work included. The rest of ``now`` it was idle."""
        busy = [0.0] * self._slots
        for record in self.records:
            if record.start is not None:
                busy[record.slot] += (self.now if record.end is None else record.end) - record.start
        return busy

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes any weights. Raises RuntimeError where requests are in flight."""
        if self.in_flight():
            raise RuntimeError(f"update_weights with {self.in_flight()} requests in flight: await or cancel them first")
        for _ in named_tensors:
            pass
        self.updates.append(version)
        self.policy_version = version

    def sleep(self) -> None:
        """Has nothing to free."""

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        return np.full(len(token_ids) - 1, LOGPROB, np.float32)

    def close(self) -> None:
        self._closed = True
        self._drop_all()


@dataclass(eq=False)
class _Request:
    number: int
    record: Record
    ids: list[int]
    stop: Stop
    future: asyncio.Future
    end: float = math.inf

    def __lt__(self, other: _Request) -> bool:
        return (self.end, self.number) < (other.end, other.number)


class IdsAsText:
    """Stands in for a tokenizer where only ids matter: token 7 reads "7 "."""

    eos_token_id = None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{int(i)} " for i in ids)

    def encode(self, text: str, add_special_tokens: bool = False, split_special_tokens: bool = True) -> list[int]:
        return [int(part) for part in text.split()]


def random_latency(seed: int, mean: float = 1.0) -> Callable[[SampleRequest, int], float]:
    """Exponential latencies, a function of ``seed`` and the request's own seed: not of the order of arrival."""

    def latency(request: SampleRequest, tokens: int) -> float:
        return float(np.random.default_rng(derive_seed("latency", seed, request.seed)).exponential(mean))

    return latency
