"""The same phases on a cluster: Ray actors hold the learner's ranks and the engines. The one file that imports ray.

A node has a placement group with a bundle a rank. By default the engines sit beside the ranks and take turns with them
on their GPUs (or, on the CPU, on the node's cores); with ``hybrid_engine=False`` they have a pool of their own. Batches
are split over the ranks here, about equal in tokens. Whatever is asked of an actor goes through :class:`Watch`: it has
a deadline, and an actor that dies ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from core.batching import busy_rows, rank_shares
from core.config.frozen import thaw
from core.driver import FOLDER, WAIT_S, DriverProcess, News
from core.engines import SampleRequest
from core.interrupts import WorkersLost
from core.learner import only_advantages_train
from core.processes import EngineProcess, LearnerProcess, RewardModelProcess, packed
from core.profiling import runtime_env
from core.provenance import ModelFingerprint
from core.rewards.model import Answer, Judgement
from core.types import TrainBatch, Trajectory
from core.workers import ClusterError, compare_probe, compute_dtype, steps_of

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)

LOOK_S = 30.0  # how often a phase that goes on is mentioned
START_S = 300.0  # for the cluster to have room
GRACE_S = 5.0  # for a death to be known after the error that it caused elsewhere, for stacks, for a tidy end
PAUSE_S = 1.0  # between two looks at the actors' lives while samples are awaited


class PhaseTimeout(WorkersLost):
    """A remote phase passed its deadline."""


LEARNER, ENGINE, JUDGE, DRIVER = (
    ray.remote(concurrency_groups={"aside": threads})(body)
    for body, threads in ((LearnerProcess, 2), (EngineProcess, 2), (RewardModelProcess, 2), (DriverProcess, 4))
)
ASIDE = {"concurrency_group": "aside"}
NAMESPACE = "rlrepro"
ROOT = Path(__file__).resolve().parents[1]


def connect(config: Config, device: torch.device) -> None:
    """To the cluster that ``ray_kwargs.ray_init.address`` or RAY_ADDRESS names, or to a local Ray that this starts.

    ``ray_kwargs.ray_init`` goes to ``ray.init`` as it is. On a cluster, processes find this code under the same path
    and stand in the same folder as this one, unless ``runtime_env`` says otherwise. Raises ClusterError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {name: value for name, value in thaw(config.ray_kwargs.ray_init).items() if value is not None}
    if options.get("address", os.environ.get("RAY_ADDRESS", "local")) == "local":
        options["address"] = "local"  # and not what else may be found on this machine
        options.setdefault("include_dashboard", False)
        if device.type == "cpu":  # Ray's CPUs are tickets: more ranks than cores are slow, not impossible
            trainer, part = config.trainer, config.actor_rollout_ref
            apart = 0 if part.hybrid_engine else part.rollout.nnodes * part.rollout.n_gpus_per_node
            bundles = trainer.nnodes * trainer.n_gpus_per_node + apart
            options.setdefault("num_cpus", max(bundles, os.cpu_count() or 1))
    else:
        environment = options.setdefault("runtime_env", {})
        if "working_dir" not in environment:
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            ours = {"PYTHONPATH": path, FOLDER: os.getcwd()}
            given = {name: str(value) for name, value in environment.get("env_vars", {}).items()}
            environment["env_vars"] = {**ours, **given}
    try:
        ray.init(**{"logging_level": logging.WARNING, **options})
    except (ConnectionError, ValueError, TypeError) as error:  # no such cluster, or an argument it does not take
        raise ClusterError(f"ray_kwargs.ray_init={options}: {error}") from error


class RayDriver:
    """A run's loop in an actor: :class:`core.driver.Driver`."""

    def __init__(self, actor: Any):
        self.actor = actor

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self.actor, method).options(**ASIDE).remote(*args))
        except RayActorError as error:
            raise WorkersLost(f"the process of the run's loop died: {' '.join(str(error).split())[:600]}") from error

    def settings(self) -> dict[str, Any]:
        return self._ask("settings")

    def read(self, seen: int) -> News:
        return self._ask("read", seen, WAIT_S)

    def interrupt(self) -> None:
        self._ask("interrupt")

    def kill(self) -> None:
        ray.kill(self.actor)


def place_driver(trainer: str, config: Config, restarts: int) -> tuple[RayDriver, bool]:
    """The actor of this run folder's loop, and whether it was there already. It takes no GPU and outlives the shell."""
    if not ray.is_initialized():
        connect(config, torch.device(config.trainer.device or ("cuda" if torch.cuda.is_available() else "cpu")))
    name = f"driver of {Path(config.trainer.default_local_dir).absolute()}"
    try:
        return RayDriver(ray.get_actor(name, namespace=NAMESPACE)), True
    except ValueError:  # there is none
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "num_gpus": 0}
    driver = RayDriver(DRIVER.options(**options).remote())
    driver._ask("start", trainer, config, restarts)
    return driver, False


class Watch:
    """Waits for remote calls, with a deadline and an eye on every actor.

    An actor that dies ends a wait at once, one that works on without an end at the deadline, and one that gives no
    sign of life (its process is stopped, or the machine hangs) after ``silence_s``.
    """

    def __init__(self, timeout_s: float, silence_s: float = 300.0):
        self.timeout_s, self.silence_s = timeout_s, silence_s
        self.look_s = min(LOOK_S, silence_s / 4)
        self.actors: dict[str, Any] = {}
        self.lifelines: dict[ray.ObjectRef, str] = {}
        self.beats: dict[str, tuple[ray.ObjectRef, float]] = {}  # the last one asked for, and when

    def add(self, name: str, actor: Any) -> None:
        self.actors[name] = actor
        self.lifelines[actor.lifeline.options(**ASIDE).remote()] = name

    def wait(self, phase: str, calls: dict[str, ray.ObjectRef]) -> list[Any]:
        """The results, in the order of ``calls`` (actor's name -> call).

        Raises WorkersLost where an actor died, PhaseTimeout where the deadline passed, else what an actor raised.
        """
        start, results = time.monotonic(), dict.fromkeys(calls)
        pending = {ref: name for name, ref in calls.items()}
        while pending:
            left = self.timeout_s - (time.monotonic() - start)
            if left <= 0:
                raise self.timeout(phase, pending.values())
            ready, _ = ray.wait([*pending, *self.lifelines], timeout=min(left, self.look_s))
            if not ready:
                log.info("%s: waiting for %s, %.0f s", phase, ", ".join(pending.values()), time.monotonic() - start)
                if error := self.silence(phase, pending.values()):
                    raise error
            for ref in ready:
                if ref in self.lifelines:
                    raise self.lost(phase)
                try:
                    results[pending.pop(ref)] = ray.get(ref)
                except RayError as error:
                    raise self.cause(phase, error) from error
        return list(results.values())

    def lost(self, phase: str, within_s: float = 0.0) -> WorkersLost | None:
        """What to raise if an actor died, or does within the time given."""
        dead, _ = ray.wait([*self.lifelines], timeout=within_s)
        if not dead:
            return None
        try:
            ray.get(dead[0])
        except RayError as error:
            reason = " ".join(str(error).split())
        return WorkersLost(f"{self.lifelines[dead[0]]} died in phase {phase}: {reason[:600]}")

    def cause(self, phase: str, error: RayError) -> BaseException:
        """The death behind an error, if there is one (ranks fail when one of them goes), else the actor's own."""
        own = error.cause if isinstance(error, RayTaskError) else error
        broken = isinstance(own, RuntimeError | RayError)  # what a broken connection raises
        return self.lost(phase, GRACE_S if broken else 0.0) or own

    def silence(self, phase: str, names: Iterable[str]) -> PhaseTimeout | None:
        """Asks each actor for a sign of life; what to raise where one has owed it for too long."""
        now, silent = time.monotonic(), []
        for name in names:
            beat, asked = self.beats.get(name, (None, now))
            if beat is None or ray.wait([beat], timeout=0)[0]:
                self.beats[name] = self.actors[name].beat.options(**ASIDE).remote(), now
            elif now - asked > self.silence_s:
                silent.append(name)
        why = f"gave no sign of life in phase {phase} for trainer.heartbeat_timeout_s={self.silence_s:g}"
        return self.with_stacks(why, silent) if silent else None

    def timeout(self, phase: str, names: Iterable[str]) -> PhaseTimeout:
        why = f"did not finish phase {phase} within trainer.phase_timeout_s={self.timeout_s:g}"
        return self.with_stacks(why, list(names))

    def with_stacks(self, why: str, names: Sequence[str]) -> PhaseTimeout:
        stacks = {name: self.actors[name].stacks.options(**ASIDE).remote() for name in names}
        ready, _ = ray.wait(list(stacks.values()), num_returns=len(stacks), timeout=GRACE_S)
        shown = [f"{name}:\n{_text(ref) if ref in ready else 'does not answer'}" for name, ref in stacks.items()]
        return PhaseTimeout(f"{', '.join(names)} {why}; Python stacks:\n" + "\n".join(shown))


def _text(ref: ray.ObjectRef) -> str:
    try:
        return ray.get(ref)
    except RayError as error:
        return str(error)


@dataclass
class _Awaited:
    """A sample in flight."""

    future: asyncio.Future
    request: SampleRequest
    engine: str | None = None


class RayEngine:
    """The engine contract over engine actors.

    What is asked in one turn of the event loop travels together, so that an engine sees it at once: prompts are then
    prefilled once, and a replay meets the same batches. The samples of a prompt go to one engine.
    """

    def __init__(self, watch: Watch, engines: Sequence[str]):
        self.watch, self.engines = watch, list(engines)
        self.policy_version = 0
        self._keys = count()
        self._awaited: dict[int, _Awaited] = {}
        self._aborts: list[ray.ObjectRef] = []
        self._tasks: set[asyncio.Task] = set()
        self._progress = 0.0
        self._closed = False

    async def sample(self, request: SampleRequest) -> Trajectory:
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._forget_closed_loops()
        key, loop = next(self._keys), asyncio.get_running_loop()
        if not any(one.engine is None for one in self._awaited.values()):
            loop.call_soon(self._send)
        one = self._awaited[key] = _Awaited(loop.create_future(), request)
        try:
            return await one.future
        finally:
            if self._awaited.pop(key, None) and one.future.cancelled():
                self._abort(key, one)

    def _send(self) -> None:
        """Places what was asked since the last time: beside the same prompt, else where least is in flight."""
        fresh = {key: one for key, one in self._awaited.items() if one.engine is None}
        sent = [one for one in self._awaited.values() if one.engine is not None]
        place = {one.request.prompt_ids: one.engine for one in sent}
        load = {name: sum(one.engine == name for one in sent) for name in self.engines}
        parts: dict[str, list[tuple[int, SampleRequest]]] = {}
        for key, one in fresh.items():
            one.engine = place.setdefault(one.request.prompt_ids, min(self.engines, key=load.__getitem__))
            load[one.engine] += 1
            parts.setdefault(one.engine, []).append((key, one.request))
        self._progress = time.monotonic()
        if not any(task.get_name() == "watch" and not task.done() for task in self._tasks):
            self._begin(self._look_after(), "watch")
        for engine, requests in parts.items():
            self._begin(self._relay(engine, requests), "relay")

    def _begin(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, engine: str, requests: list[tuple[int, SampleRequest]]) -> None:
        """Hands the actor's outcomes to those who await them."""
        try:
            stream = self.watch.actors[engine].sample.options(num_returns="streaming").remote(requests)
            async for part in stream:
                self._progress = time.monotonic()
                for key, outcome in await part:
                    self._settle(key, outcome)
        except RayError as error:
            cause = await asyncio.to_thread(self.watch.cause, "generate", error)
            for key, _ in requests:
                self._settle(key, cause)

    async def _look_after(self) -> None:
        """While samples are awaited: any actor's death, silence, or no sample for too long, ends them all."""
        next_beat = time.monotonic() + self.watch.look_s
        while self._awaited:
            await asyncio.sleep(PAUSE_S)
            error = self.watch.lost("generate")
            busy = sorted({one.engine for one in self._awaited.values() if one.engine})
            if error is None and busy and time.monotonic() - self._progress > self.watch.timeout_s:
                error = await asyncio.to_thread(self.watch.timeout, "generate", busy)
            if error is None and busy and time.monotonic() > next_beat:
                next_beat = time.monotonic() + self.watch.look_s
                error = await asyncio.to_thread(self.watch.silence, "generate", busy)
            if error is not None:
                for key in list(self._awaited):
                    self._settle(key, error)
                return

    def _settle(self, key: int, outcome: Trajectory | BaseException) -> None:
        one = self._awaited.get(key)
        if one is None or one.future.done():
            return
        if isinstance(outcome, asyncio.CancelledError):
            one.future.cancel()
        elif isinstance(outcome, BaseException):
            one.future.set_exception(outcome)
        else:
            one.future.set_result(outcome)

    def _abort(self, key: int, one: _Awaited) -> None:
        if one.engine in self.watch.actors and not self._closed:
            self._aborts.append(self.watch.actors[one.engine].abort.remote(key))

    def _forget_closed_loops(self) -> None:
        for key, one in list(self._awaited.items()):
            if one.future.get_loop().is_closed():
                self._abort(key, self._awaited.pop(key))
        self._tasks = {task for task in self._tasks if not task.get_loop().is_closed()}

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.publish(ray.put(packed(named_tensors)), version, {})

    def publish(self, weights: ray.ObjectRef, version: int, others: dict[str, ray.ObjectRef]) -> None:
        """Gives every engine what ``weights`` will hold; waits for ``others`` too."""
        self._refuse_in_flight("update_weights")
        calls = {name: self.watch.actors[name].update_weights.remote([weights], version) for name in self.engines}
        self.watch.wait("update_weights", {**others, **calls})
        self.policy_version = version

    def sleep(self) -> None:
        self._refuse_in_flight("sleep")
        self.watch.wait("sleep", {name: self.watch.actors[name].sleep.remote() for name in self.engines})

    def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        return self.probes(token_ids)[0]

    def probes(self, token_ids: tuple[int, ...]) -> list[np.ndarray]:
        calls = {name: self.watch.actors[name].probe.remote(token_ids) for name in self.engines}
        return self.watch.wait("probe", calls)

    def _refuse_in_flight(self, what: str) -> None:
        self._forget_closed_loops()
        if self._awaited:
            raise RuntimeError(f"{what} with {len(self._awaited)} requests in flight: await or cancel them")
        aborts, self._aborts = self._aborts, []  # calls of an actor with coroutines may overtake one another
        if aborts:
            ray.wait(aborts, num_returns=len(aborts), timeout=self.watch.timeout_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._forget_closed_loops()
        for one in self._awaited.values():
            one.future.cancel()
        calls = [self.watch.actors[name].close.remote() for name in self.engines]
        ray.wait(calls, num_returns=len(calls), timeout=GRACE_S)


class RayJudge:
    """The reward model's actor, as a function of answers; it has the phases' deadline."""

    NAME = "reward model"

    def __init__(self, watch: Watch):
        self.watch = watch

    async def __call__(self, answers: Sequence[Answer]) -> list[Judgement]:
        call = self.watch.actors[self.NAME].judge.remote(list(answers))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call.future()), self.watch.timeout_s)
        except TimeoutError:
            raise await asyncio.to_thread(self.watch.timeout, "judge", [self.NAME]) from None
        except RayError as error:
            raise await asyncio.to_thread(self.watch.cause, "judge", error) from error


class RayWorkers:
    """The phases of :class:`core.workers.Workers` over ``trainer.nnodes * trainer.n_gpus_per_node`` learner ranks.

    An engine computes on ``rollout.tensor_model_parallel_size`` GPUs of its pool, hf on one; on the CPU a node that
    engines share with learners has one engine with all of the node's threads.
    Starts a local Ray unless ``ray_kwargs.ray_init.address`` names a cluster or one is connected to already, and
    ends what it started. Checkpoints need a folder that all nodes see. Raises ClusterError where there is no room.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        device: torch.device,
        *,
        needs_ref: bool,
        needs_critic: bool,
        master_dtype: torch.dtype = torch.float32,
    ):
        trainer = config.trainer
        self.config, self.device = config, device
        self.per_node, self.ranks = trainer.n_gpus_per_node, trainer.nnodes * trainer.n_gpus_per_node
        cores = os.cpu_count() or 1
        self.threads = trainer.cpu_threads or max(1, cores // self.per_node)
        self.watch = Watch(trainer.phase_timeout_s, trainer.heartbeat_timeout_s)
        self.learners: list[Any] = []
        self.engine: RayEngine | None = None
        self.judge: RayJudge | None = None
        self.groups: list[Any] = []  # a node each
        self.engine_groups: list[Any] = []  # of the engines' own pool
        self.owns_ray = not ray.is_initialized()
        try:
            if self.owns_ray:
                connect(config, device)
            if trainer.device is None and ray.cluster_resources().get("GPU"):
                self.device = torch.device("cuda")  # the driver's own machine need not have one
            self._reserve()
            self._start(needs_ref, needs_critic, master_dtype)
            if config.reward_model.enable:
                self.judge = self._start_judge()
        except BaseException:
            self.close()
            raise

    # -- starting and ending ---------------------------------------------------------------------

    def _reserve(self) -> None:
        trainer, part = self.config.trainer, self.config.actor_rollout_ref
        rollout = part.rollout
        self.engine_gpus = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
        self.groups = self._pool(trainer.nnodes, self.per_node, 1)
        if not part.hybrid_engine:
            self.engine_groups = self._pool(
                rollout.nnodes, rollout.n_gpus_per_node // self.engine_gpus, self.engine_gpus
            )
        deadline = time.monotonic() + min(START_S, self.watch.timeout_s)
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in self.groups + self.engine_groups):
            pool = f" and of rollout.nnodes={rollout.nnodes} rollout.n_gpus_per_node={rollout.n_gpus_per_node}"
            own = pool if self.engine_groups else ""
            raise ClusterError(
                f"trainer.nnodes={trainer.nnodes} trainer.n_gpus_per_node={self.per_node}: no room for that many "
                f"bundles of {self._bundle(1)} on that many nodes{own}; the cluster has "
                f"{ray.cluster_resources()} in all and {ray.available_resources()} left. Ask for less, or wait for "
                "other runs to end"
            )

    def _bundle(self, gpus: int) -> dict[str, float]:
        return {"CPU": 1.0, **({"GPU": float(gpus)} if self.device.type == "cuda" else {})}

    def _pool(self, nodes: int, bundles: int, gpus: int) -> list[Any]:
        return [placement_group([self._bundle(gpus)] * bundles, strategy="STRICT_PACK") for _ in range(nodes)]

    def _start(self, needs_ref: bool, needs_critic: bool, master_dtype: torch.dtype) -> None:
        for rank in range(self.ranks):
            place = self._place(self.groups[rank // self.per_node], rank % self.per_node, gpus=1)
            self.learners.append(LEARNER.options(**place).remote(self.threads))
            self.watch.add(f"learner rank {rank}", self.learners[-1])
        engines = self._start_engines()
        (address,) = self.watch.wait(
            "start", {"learner rank 0": self.learners[0].host.remote(ray.util.get_node_ip_address)}
        )
        options = {"device": self.device, "needs_ref": needs_ref, "needs_critic": needs_critic}
        calls = {
            f"learner rank {rank}": actor.join.remote(
                rank, self.ranks, address, self.watch.timeout_s, self.config, master_dtype=master_dtype, **options
            )
            for rank, actor in enumerate(self.learners)
        }
        calls.update({name: self.watch.actors[name].start.remote() for name in engines})
        self.watch.wait("load", calls)
        self.engine = RayEngine(self.watch, engines)

    def _start_engines(self) -> list[str]:
        """An actor an engine; returns their names. Beside learners Ray's GPUs are the learners', and an engine is told
        which of them are its own."""
        cores = self.config.trainer.cpu_threads or os.cpu_count() or 1
        if self.engine_groups:
            places = [(group, index) for group in self.engine_groups for index in range(group.bundle_count)]
            each = [(place, (), max(1, cores // place[0].bundle_count)) for place in places]
        elif self.device.type == "cuda":
            calls = {f"learner rank {r}": actor.gpus.remote(ray.get_gpu_ids) for r, actor in enumerate(self.learners)}
            gpus = self.watch.wait("start", calls)
            firsts = range(0, self.ranks, self.engine_gpus)
            taken = [sum(gpus[rank : rank + self.engine_gpus], []) for rank in firsts]
            places = [(self.groups[rank // self.per_node], rank % self.per_node) for rank in firsts]
            each = [(place, own, self.threads) for place, own in zip(places, taken, strict=True)]
        else:
            each = [((group, 0), (), cores) for group in self.groups]
        names = []
        for (group, index), own_gpus, threads in each:
            place = self._place(group, index, gpus=self.engine_gpus if self.engine_groups else 0)
            names.append(f"engine {len(names)}")
            self.watch.add(names[-1], ENGINE.options(**place).remote(self.config, self.device, threads, own_gpus))
        return names

    def _place(self, group: Any, index: int, gpus: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        given = gpus if self.device.type == "cuda" else 0
        profiler = runtime_env(self.config.global_profiler)
        return {"scheduling_strategy": strategy, "num_cpus": 0.5, "num_gpus": given, **profiler}

    def _start_judge(self) -> RayJudge:
        """The reward model has a GPU of its own, where there are any: it works while the engines decode."""
        gpus = 1 if self.device.type == "cuda" else 0
        actor = JUDGE.options(num_cpus=0, num_gpus=gpus).remote(self.config, self.device, self.threads)
        self.watch.add(RayJudge.NAME, actor)
        self.watch.wait("load", {RayJudge.NAME: actor.ready.remote()})
        return RayJudge(self.watch)

    def close(self) -> None:
        """Ends the actors and what else this object started. A second call does nothing."""
        if not ray.is_initialized():
            return
        if self.engine is not None:
            self.engine.close()
        if self.config.ray_kwargs.timeline_json_file and self.watch.actors:
            _write_timeline(Path(self.config.ray_kwargs.timeline_json_file).expanduser())
        for actor in self.watch.actors.values():
            ray.kill(actor)
        for group in self.groups + self.engine_groups:
            remove_placement_group(group)
        self.watch.actors, self.learners, self.groups, self.engine_groups, self.engine = {}, [], [], [], None
        if self.owns_ray:
            ray.shutdown()

    # -- phases ----------------------------------------------------------------------------------

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        part = self.config.actor_rollout_ref.actor
        log_prob, entropy = self._pass("old_log_prob", "compute_log_probs", batch, part)
        return log_prob, entropy

    def compute_ref_log_prob(self, batch: TrainBatch) -> Tensor:
        return self._pass("ref", "compute_ref_log_prob", batch, self.config.actor_rollout_ref.ref)[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        return self._pass("values", "compute_values", batch, self.config.critic)[0]

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        part, length = self.config.actor_rollout_ref.actor, self.config.data.max_response_length
        steps = steps_of(batch, part, length, part.policy_loss.loss_mode)
        return self._update("update_actor", steps, only_advantages_train(part), lr_multiplier, part)

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        steps = steps_of(batch, self.config.critic, self.config.data.max_response_length)
        return self._update("update_critic", steps, False, lr_multiplier, self.config.critic)

    def sync_weights(self, version: int) -> dict[str, float]:
        rollout = self.config.actor_rollout_ref.rollout
        dtype = compute_dtype(rollout.dtype) or torch.float32
        first, *others = (actor.weights.remote(dtype) for actor in self.learners)
        self.engine.publish(first, version, {f"learner rank {r}": ref for r, ref in enumerate(others, start=1)})
        ids, expected = self._each("probe", "probe", [()] * self.ranks)[0]
        bf16 = not self.full_precision
        differences = [compare_probe(expected, found, bf16=bf16) for found in self.engine.probes(ids)]
        return {"rollout_corr/probe_diff": max(differences)}

    @property
    def full_precision(self) -> bool:
        part = self.config.actor_rollout_ref
        return compute_dtype(part.actor.fsdp_config.dtype) is None and compute_dtype(part.rollout.dtype) is None

    @property
    def overlaps(self) -> bool:
        """On the CPU; on a GPU engine and learner take turns."""
        return self.device.type == "cpu"

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        return self._each("fingerprints", "fingerprints", [()])[0]

    def save(self, folder: Path) -> None:
        self._each("save_checkpoint", "save", [(str(folder.absolute()),)] * self.ranks)

    def load(self, folder: Path) -> None:
        self._each("load_checkpoint", "load", [(str(folder.absolute()),)] * self.ranks)

    def start_profile(self) -> None:
        tool = self.config.global_profiler.tool
        calls = {name: actor.start_profile.remote(tool) for name, actor in self._profiled().items()}
        self.watch.wait("start_profile", calls)

    def stop_profile(self, folder: Path, name: str) -> None:
        calls = {
            actor: handle.stop_profile.remote(str(folder.absolute() / f"{name}_{actor.replace(' ', '_')}.json"))
            for actor, handle in self._profiled().items()
        }
        self.watch.wait("stop_profile", calls)

    def _profiled(self) -> dict[str, Any]:
        """Learners and engines; not a reward model."""
        return {name: actor for name, actor in self.watch.actors.items() if name != RayJudge.NAME}

    def _each(self, phase: str, method: str, arguments: Sequence[tuple]) -> list[Any]:
        """The method on rank 0, 1, ... with its arguments."""
        calls = {
            f"learner rank {rank}": self.learners[rank].call.remote(method, *a) for rank, a in enumerate(arguments)
        }
        return self.watch.wait(phase, calls)

    def _take_turns(self) -> None:
        """Engines on the learners' GPUs sleep from here to the next sync."""
        part = self.config.actor_rollout_ref
        if self.device.type == "cuda" and part.hybrid_engine and part.rollout.free_cache_engine:
            self.engine.sleep()

    def _shares(self, batch: TrainBatch, together: int) -> list[Tensor]:
        """Row numbers for each group of ``together`` neighbours, which split the tokens of the same rows."""
        groups = self.ranks // together
        if self.config.trainer.balance_batch:
            return rank_shares(batch.attention_mask.sum(dim=1), groups)
        return list(torch.arange(len(batch)).tensor_split(groups))

    def _pass(self, phase: str, method: str, batch: TrainBatch, part: Any) -> list[Tensor]:
        """A pass of ``part`` over all rows, put together again: [B, T] tensors."""
        self._take_turns()
        together = part.ulysses_sequence_parallel_size
        shares = self._shares(batch, together)
        rows = [_trimmed(batch, share) for share in shares]
        parts = self._each(phase, method, [(rows[rank // together],) for rank in range(self.ranks)])[::together]
        whole = [torch.zeros(batch.input_ids.shape, dtype=one.dtype) for one in parts[0]]
        for share, found in zip(shares, parts, strict=True):
            for target, value in zip(whole, found, strict=True):
                target[share, : value.shape[1]] = value
        return whole

    def _update(
        self, phase: str, steps: Iterable[TrainBatch], only_advantages: bool, lr_multiplier: float, part: Any
    ) -> dict[str, float]:
        """All optimizer steps of ``part``. The rows that train are shared out apart from those that only a metric
        reads."""
        self._take_turns()
        together = part.ulysses_sequence_parallel_size
        by_group: list[list[TrainBatch]] = [[] for _ in range(self.ranks // together)]
        for step in steps:
            busy = busy_rows(step, only_advantages_train=only_advantages)
            shares = []
            for chosen in (busy, ~busy):
                rows = chosen.nonzero()[:, 0]
                shares.append([rows[share] for share in self._shares(step.rows(rows), together)])
            for mine, indices in zip(by_group, zip(*shares, strict=True), strict=True):
                mine.append(_trimmed(step, torch.cat(indices)))
        arguments = [(by_group[rank // together], lr_multiplier) for rank in range(self.ranks)]
        return self._each(phase, phase, arguments)[0]


def _write_timeline(path: Path) -> None:
    """Where each process was when, for chrome://tracing or Perfetto. Without it a run is none the worse."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ray.timeline(filename=str(path))
    except (RayError, OSError) as error:
        log.warning("ray_kwargs.timeline_json_file=%s was not written: %s", path, error)


def _trimmed(batch: TrainBatch, index: Tensor) -> TrainBatch:
    """The rows without the columns that only others fill."""
    rows = batch.rows(index)
    return rows.cut(max(2, int(rows.attention_mask.sum(dim=1).max()))) if len(rows) else rows.cut(2)
