"""Engine actors behind the engine contract, and the reward model's actor as a function of
answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from core.cluster.ray_watch import GRACE_S, Watch
from core.engines.engine import SampleRequest
from core.engines.weight_buckets import Bucket, Proof, Weight
from core.errors import out_of_memory
from core.learner.passes import WeightSyncError
from core.rewards.grading import Answer, Scores
from core.types import Trajectory

PAUSE_S = 1.0  # between two checks of the actors while samples are awaited
REWARD_MODEL = "reward model"  # the name of its actor


@dataclass
class _Awaited:
    """A sample in flight."""

    future: asyncio.Future
    request: SampleRequest
    engine: str | None = None
    sent_at: float = 0.0


class RayEngine:
    """The engine contract over engine actors.

    Requests of one turn of the event loop travel together, so that an engine receives them at once:
    prompts are then prefilled once, and a replay meets the same batches. The samples of a prompt go
    to one engine, and so do the turns of an episode: the engine's prefix cache holds the earlier
    ones.
    """

    def __init__(self, watch: Watch, engines: Sequence[str]):
        self.watch, self.engines = watch, list(engines)
        self.policy_version = 0
        self._keys = count()
        self._awaited: dict[int, _Awaited] = {}
        # Episode -> the engine that wrote its latest turn with these weights
        self._homes: dict[int, str] = {}
        self._aborts: list[ray.ObjectRef] = []
        self._tasks: set[asyncio.Task] = set()
        self._sends_on: asyncio.AbstractEventLoop | None = None  # the loop that is about to send
        self._watching: asyncio.Task | None = None
        self._progress = 0.0
        self._closed = False

    async def sample(self, request: SampleRequest) -> Trajectory:
        if self._closed:
            raise RuntimeError("the engine is closed")
        key, loop = next(self._keys), asyncio.get_running_loop()
        if self._sends_on is not loop:
            self._sends_on = loop
            loop.call_soon(self._send)
        entry = self._awaited[key] = _Awaited(loop.create_future(), request)
        try:
            return await entry.future
        finally:
            if self._awaited.pop(key, None) and entry.future.cancelled():
                self._abort(key, entry)

    def _abort(self, key: int, entry: _Awaited) -> None:
        if entry.engine in self.watch.actors and not self._closed:
            self._aborts.append(self.watch.actors[entry.engine].abort.remote(key))

    def _forget_closed_loops(self) -> None:
        """Abort what is awaited on an event loop that was closed: its futures cannot be settled any
        more."""
        for key, entry in list(self._awaited.items()):
            if entry.future.get_loop().is_closed():
                self._abort(key, self._awaited.pop(key))
        self._tasks = {task for task in self._tasks if not task.get_loop().is_closed()}

    def _send(self) -> None:
        """Send new requests: beside the same prompt, else to the episode's engine, else where least
        is in flight."""
        self._forget_closed_loops()
        self._sends_on, self._progress = None, time.monotonic()
        place: dict[tuple[Any, ...], str] = {}
        load: Counter[str] = Counter()
        parts: dict[str, list[tuple[int, SampleRequest]]] = {}
        # Those that were sent are the older ones, and come first
        for key, entry in self._awaited.items():
            request = entry.request
            # Equal ids with other media are another prompt
            prompt = request.prompt_ids, request.media
            if entry.engine is None:
                home = self._homes.get(request.episode) or min(self.engines, key=load.__getitem__)
                entry.engine = place.get(prompt, home)
                if request.episode is not None:
                    self._homes[request.episode] = entry.engine
                entry.sent_at = self._progress
                parts.setdefault(entry.engine, []).append((key, request))
            place.setdefault(prompt, entry.engine)
            load[entry.engine] += 1
        for engine, requests in parts.items():
            self._begin(self._relay(engine, requests))
        if self._watching not in self._tasks or self._watching.done():
            self._watching = self._begin(self._watch_over())

    def _begin(self, work: Any) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # a loop alone does not keep its tasks
        task.add_done_callback(self._tasks.discard)
        return task

    async def _relay(self, engine: str, requests: list[tuple[int, SampleRequest]]) -> None:
        """Pass the actor's outcomes, and whatever fails on the way, on to the futures that await
        them."""
        try:
            stream = (
                self.watch.actors[engine].sample.options(num_returns="streaming").remote(requests)
            )
            async for part in stream:
                self._progress = time.monotonic()
                outcomes = await part
                for key, outcome in outcomes:
                    if isinstance(outcome, Exception):
                        full = out_of_memory(outcome, "generate", f"on {self.watch.named(engine)}")
                        outcome = full or self.watch.located(outcome, engine)
                    self._settle(key, outcome)
        except Exception as error:  # without this the futures would never be settled
            if isinstance(error, RayError):
                error = await asyncio.to_thread(self.watch.cause, "generate", error, engine)
            for key, _ in requests:
                self._settle(key, error)

    async def _watch_over(self) -> None:
        """End all awaited samples at any actor's death, or when none has finished for too long."""
        error = None
        while self._awaited and error is None:
            await asyncio.sleep(PAUSE_S)
            error = self.watch.lost("generate")
            busy = sorted({entry.engine for entry in self._awaited.values() if entry.engine})
            if (
                error is None
                and busy
                and time.monotonic() - self._progress > self.watch.limit("generate")
            ):
                error = self.watch.timeout("generate", busy)
        for key in list(self._awaited):
            self._settle(key, error)

    def _settle(self, key: int, outcome: Trajectory | BaseException) -> None:
        entry = self._awaited.get(key)
        if entry is None or entry.future.done():
            return
        if isinstance(outcome, asyncio.CancelledError):
            entry.future.cancel()
        elif isinstance(outcome, BaseException):
            entry.future.set_exception(outcome)
        else:
            self.watch.took("generate", time.monotonic() - entry.sent_at)
            entry.future.set_result(outcome)

    def begin_update(self, weights: Sequence[Weight]) -> None:
        self._refuse_in_flight("update_weights")
        self._call("update_weights", "begin_update", weights)

    def load(self, bucket: Bucket, others: Mapping[str, ray.ObjectRef]) -> None:
        """Give every engine a bucket; wait for the calls ``others`` too, which the engines may
        need."""
        calls = {name: self.watch.actors[name].call.remote("load", bucket) for name in self.engines}
        self.watch.wait("update_weights", {**others, **calls})

    def end_update(self, version: int) -> list[Proof]:
        """Return the first engine's proof for each device. Raises WeightSyncError where another
        engine's is another."""
        first, *others = self._call("update_weights", "end_update", version)
        self.policy_version = version
        self._homes.clear()  # no prefix outlives the weights that read it
        for name, proofs in zip(self.engines[1:], others, strict=True):
            if proofs != first:
                raise WeightSyncError(
                    f"after the weight sync {name} and {self.engines[0]} have different weights"
                )
        return first

    def _call(self, phase: str, method: str, *arguments: Any) -> list[Any]:
        return self.watch.call(phase, "call", dict.fromkeys(self.engines, (method, *arguments)))

    def sleep(self) -> None:
        self._refuse_in_flight("sleep")
        self._call("sleep", "sleep")

    def probes(self, token_ids: tuple[int, ...]) -> list[np.ndarray]:
        """Return the probe of every engine."""
        return self._call("probe", "probe", token_ids)

    def _refuse_in_flight(self, what: str) -> None:
        self._forget_closed_loops()
        if self._awaited:
            raise RuntimeError(
                f"{what} with {len(self._awaited)} requests in flight: await or cancel them"
            )
        # Calls of an actor with coroutines may overtake one another
        aborts, self._aborts = self._aborts, []
        if aborts:
            ray.wait(aborts, num_returns=len(aborts), timeout=self.watch.limit("generate"))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._forget_closed_loops()
        for entry in self._awaited.values():
            entry.future.cancel()
        calls = [self.watch.actors[name].call.remote("close") for name in self.engines]
        if calls:  # a run that answers nothing has no engine
            ray.wait(calls, num_returns=len(calls), timeout=GRACE_S)


async def score_over_ray(watch: Watch, answers: Sequence[Answer]) -> Scores:
    """Return the scores of the reward model's actor, within the phases' deadline."""
    phase, start = "reward_model", time.monotonic()
    call = asyncio.wrap_future(watch.actors[REWARD_MODEL].score.remote(answers).future())
    try:
        scores = await asyncio.wait_for(call, watch.limit(phase))
        watch.took(phase, time.monotonic() - start)
        return scores
    except TimeoutError:
        raise await asyncio.to_thread(watch.timeout, phase, [REWARD_MODEL]) from None
    except RayError as error:
        raise await asyncio.to_thread(watch.cause, phase, error, REWARD_MODEL) from error
