"""Engine actors behind the engine contract, and the reward model's actor as a function."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
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
        self.watch = watch
        self.engines = list(engines)
        self.policy_version = 0
        self._keys = count()
        self._awaited: dict[int, _Awaited] = {}
        self._homes: dict[int, str] = {}  # episode -> the engine that wrote its latest turn
        self._aborts: list[ray.ObjectRef] = []
        self._tasks: set[asyncio.Task] = set()
        self._sends_on: asyncio.AbstractEventLoop | None = None  # the loop that is about to send
        self._watching: asyncio.Task | None = None
        self._progress = 0.0
        self._closed = False

    async def sample(self, request: SampleRequest) -> Trajectory:
        if self._closed:
            raise RuntimeError("the engine is closed")
        loop = asyncio.get_running_loop()
        if self._sends_on is not loop:
            self._sends_on = loop
            loop.call_soon(self._send)
        key = next(self._keys)
        sample = _Awaited(loop.create_future(), request)
        self._awaited[key] = sample
        try:
            return await sample.future
        finally:
            if self._awaited.pop(key, None) and sample.future.cancelled():
                self._abort(key, sample)

    def _abort(self, key: int, sample: _Awaited) -> None:
        if sample.engine in self.watch.actors and not self._closed:
            self._aborts.append(self.watch.actors[sample.engine].abort.remote(key))

    def _forget_closed_loops(self) -> None:
        """Abort samples of an event loop that was closed: nobody can await them any more."""
        for key, sample in list(self._awaited.items()):
            if sample.future.get_loop().is_closed():
                self._abort(key, self._awaited.pop(key))
        self._tasks = {task for task in self._tasks if not task.get_loop().is_closed()}

    def _send(self) -> None:
        """Send the new requests to engines.

        A request goes where its prompt is, else to the engine of its episode, else where least is
        in flight.
        """
        self._forget_closed_loops()
        self._sends_on = None
        self._progress = time.monotonic()
        engine_of: dict[tuple[Any, ...], str] = {}  # prompt -> engine
        load: Counter[str] = Counter()
        new: dict[str, list[tuple[int, SampleRequest]]] = {}
        for key, sample in self._awaited.items():  # sent ones are older, so they come first
            request = sample.request
            prompt = request.prompt_ids, request.media  # equal ids may have other media
            if sample.engine is None:
                home = self._homes.get(request.episode) or min(self.engines, key=load.__getitem__)
                sample.engine = engine_of.get(prompt, home)
                sample.sent_at = self._progress
                if request.episode is not None:
                    self._homes[request.episode] = sample.engine
                new.setdefault(sample.engine, []).append((key, request))
            engine_of.setdefault(prompt, sample.engine)
            load[sample.engine] += 1
        for engine, requests in new.items():
            self._begin(self._relay(engine, requests))
        if self._watching not in self._tasks or self._watching.done():
            self._watching = self._begin(self._watch_over())

    def _begin(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # a loop alone does not keep its tasks
        task.add_done_callback(self._tasks.discard)
        return task

    async def _relay(self, engine: str, requests: list[tuple[int, SampleRequest]]) -> None:
        """Pass the actor's outcomes, or what fails on the way, to the futures that await them."""
        try:
            sample = self.watch.actors[engine].sample.options(num_returns="streaming")
            async for part in sample.remote(requests):
                self._progress = time.monotonic()
                for key, outcome in await part:
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
        """End all samples when any actor dies, or when none has finished for too long."""
        error = None
        while self._awaited and error is None:
            await asyncio.sleep(PAUSE_S)
            error = self.watch.lost("generate")
            busy = sorted({each.engine for each in self._awaited.values() if each.engine})
            idle_s = time.monotonic() - self._progress
            if error is None and busy and idle_s > self.watch.limit("generate"):
                error = self.watch.timeout("generate", busy)
        for key in list(self._awaited):
            self._settle(key, error)

    def _settle(self, key: int, outcome: Trajectory | BaseException) -> None:
        sample = self._awaited.get(key)
        if sample is None or sample.future.done():
            return
        if isinstance(outcome, asyncio.CancelledError):
            sample.future.cancel()
        elif isinstance(outcome, BaseException):
            sample.future.set_exception(outcome)
        else:
            self.watch.took("generate", time.monotonic() - sample.sent_at)
            sample.future.set_result(outcome)

    def begin_update(self, weights: Sequence[Weight]) -> None:
        self._refuse_in_flight("update_weights")
        self._call("update_weights", "begin_update", weights)

    def load(self, bucket: Bucket, sender: Mapping[str, ray.ObjectRef]) -> None:
        """Give every engine a bucket; wait for the calls of its ``sender`` too."""
        calls = {name: self.watch.actors[name].call.remote("load", bucket) for name in self.engines}
        self.watch.wait("update_weights", {**sender, **calls})

    def end_update(self, version: int) -> list[Proof]:
        """Return the first engine's proof for each device.

        Raises WeightSyncError where another engine has other weights.
        """
        first, *others = self._call("update_weights", "end_update", version)
        self.policy_version = version
        self._homes.clear()  # no prefix outlives the weights that read it
        for name, proofs in zip(self.engines[1:], others, strict=True):
            if proofs != first:
                differ = f"{name} and {self.engines[0]} have different weights"
                raise WeightSyncError(f"after the weight sync {differ}")
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
            count = len(self._awaited)
            raise RuntimeError(f"{what} with {count} requests in flight: await or cancel them")
        # Calls of an actor with coroutines may overtake one another
        aborts = self._aborts
        self._aborts = []
        if aborts:
            ray.wait(aborts, num_returns=len(aborts), timeout=self.watch.limit("generate"))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._forget_closed_loops()
        for sample in self._awaited.values():
            sample.future.cancel()
        calls = [self.watch.actors[name].call.remote("close") for name in self.engines]
        if calls:  # a run that answers nothing has no engine
            ray.wait(calls, num_returns=len(calls), timeout=GRACE_S)


async def score_over_ray(watch: Watch, answers: Sequence[Answer]) -> Scores:
    """Return the scores of the reward model's actor, within the phase's deadline."""
    phase = "reward_model"
    start = time.monotonic()
    call = watch.actors[REWARD_MODEL].score.remote(answers)
    try:
        scores = await asyncio.wait_for(asyncio.wrap_future(call.future()), watch.limit(phase))
    except TimeoutError:
        raise await asyncio.to_thread(watch.timeout, phase, [REWARD_MODEL]) from None
    except RayError as error:
        raise await asyncio.to_thread(watch.cause, phase, error, REWARD_MODEL) from error
    watch.took(phase, time.monotonic() - start)
    return scores
