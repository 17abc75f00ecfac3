"""The processes of a run on Ray: a connection, placement groups, and an actor for each learner rank and engine.

A node has a placement group with a bundle a rank. By default the engines sit beside the ranks and alternate with them
on their GPUs (or, on the CPU, on the node's cores); with ``hybrid_engine=False`` they have a pool of their own.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.cluster.driver import FOLDER
from core.cluster.processes import EngineProcess, LearnerProcess, RewardModelProcess
from core.cluster.ray_engine import RayEngine, RayRewardModel
from core.cluster.ray_watch import Watch
from core.config.frozen import thaw
from core.errors import InputError
from core.tracking.profiling import runtime_env
from core.tracking.run_manifest import ROOT

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)

START_S = 300.0  # for the cluster to have room
# A cluster that a token protects refuses others without naming the token.
TOKEN_HINT = "; where `ray start` made the cluster ask for a token, set RAY_AUTH_MODE=token"


def actor_class(body: type, threads: int) -> Any:
    """Return an actor class with ``threads`` that answer aside while a method is at work."""
    return ray.remote(concurrency_groups={"aside": threads})(body)


def rank_name(rank: int) -> str:
    return f"learner rank {rank}"


LEARNER, ENGINE, REWARD_MODEL = (actor_class(body, 2) for body in (LearnerProcess, EngineProcess, RewardModelProcess))


def connect(config: Config, device: torch.device) -> None:
    """Connect to the cluster that ``ray_kwargs.ray_init.address`` or RAY_ADDRESS names, or start a local Ray.

    ``ray_kwargs.ray_init`` goes to ``ray.init`` unchanged. On a cluster, processes find this code under the same path
    and start in the same folder as this one, unless ``runtime_env`` has a ``working_dir``. Raises InputError.
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
        unsaid = isinstance(error, ConnectionError) and "RAY_AUTH_MODE" not in os.environ
        raise InputError(f"ray_kwargs.ray_init={options}: {error}{TOKEN_HINT if unsaid else ''}") from error


class RayProcesses:
    """The actors of a run, from the connection to their end.

    An engine computes on ``rollout.tensor_model_parallel_size`` GPUs of its pool, hf on one; on the CPU a node that
    engines share with learners has one engine with all of the node's threads. ``learner`` are keyword arguments of
    :class:`core.cluster.fsdp.LearnerRank`. With ``learners=False`` there are engines alone, which read their own
    weights: on GPUs as many as have room, on the CPU ``trainer.n_gpus_per_node`` a node.
    Starts a local Ray unless ``ray_kwargs.ray_init.address`` names a cluster or one is connected to already, and
    ends what it started. Raises InputError where there is no room.
    """

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, *, learners: bool = True, **learner: Any):
        trainer = config.trainer
        self.config, self.device = config, device
        self.per_node = trainer.n_gpus_per_node
        self.ranks = trainer.nnodes * trainer.n_gpus_per_node if learners else 0
        self.threads = trainer.cpu_threads or max(1, (os.cpu_count() or 1) // self.per_node)
        self.watch = Watch(trainer.phase_timeout_s, trainer.heartbeat_timeout_s)
        self.learners: list[Any] = []
        self.engine_gpus = 1  # of each engine
        self.engine: RayEngine | None = None
        self.reward_model: RayRewardModel | None = None
        self.groups: list[Any] = []  # a node each
        self.engine_groups: list[Any] = []  # of the engines' own pool
        self.owns_ray = not ray.is_initialized()
        try:
            if self.owns_ray:
                connect(config, device)
            if trainer.device is None and ray.cluster_resources().get("GPU"):
                self.device = torch.device("cuda")  # the driver's own machine need not have one
            self._reserve()
            self._start(learner)
            if config.reward_model.enable:
                self.reward_model = self._start_reward_model()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        """Create the placement groups and wait until the cluster has room for them."""
        trainer, part = self.config.trainer, self.config.actor_rollout_ref
        rollout, cuda = part.rollout, self.device.type == "cuda"
        self.engine_gpus = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1

        def bundle(gpus: int) -> dict[str, float]:
            return {"CPU": 1.0, **({"GPU": float(gpus)} if cuda else {})}

        def pool(nodes: int, bundles: int, gpus: int) -> list[Any]:
            return [placement_group([bundle(gpus)] * bundles, strategy="STRICT_PACK") for _ in range(nodes)]

        own = ""
        if not self.ranks:
            self.engine_groups = pool(trainer.nnodes, self.per_node // self.engine_gpus, self.engine_gpus)
        else:
            self.groups = pool(trainer.nnodes, self.per_node, 1)
        if self.ranks and not part.hybrid_engine:
            self.engine_groups = pool(rollout.nnodes, rollout.n_gpus_per_node // self.engine_gpus, self.engine_gpus)
            own = f" and of rollout.nnodes={rollout.nnodes} rollout.n_gpus_per_node={rollout.n_gpus_per_node}"
        deadline = time.monotonic() + min(START_S, self.watch.timeout_s)
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in self.groups + self.engine_groups):
            raise InputError(
                f"trainer.nnodes={trainer.nnodes} trainer.n_gpus_per_node={self.per_node}: no room for that many "
                f"bundles of {bundle(1)} on that many nodes{own}; the cluster has "
                f"{ray.cluster_resources()} in all and {ray.available_resources()} left. Ask for less, or wait for "
                "other runs to end"
            )

    def _start(self, learner: dict[str, Any]) -> None:
        for rank in range(self.ranks):
            place = self._place(self.groups[rank // self.per_node], rank % self.per_node, gpus=1)
            self.learners.append(LEARNER.options(**place).remote(self.threads))
            self.watch.add(rank_name(rank), self.learners[-1])
        engines = self._start_engines()
        calls = {}
        if self.learners:
            (address,) = self.watch.call("start", "host", {rank_name(0): (ray.util.get_node_ip_address,)})
            calls = {
                rank_name(rank): actor.join.remote(rank, address, self.config, self.device, **learner)
                for rank, actor in enumerate(self.learners)
            }
        calls.update({name: self.watch.actors[name].start.remote(not self.learners) for name in engines})
        self.watch.wait("load", calls)
        self.engine = RayEngine(self.watch, engines)

    def _start_engines(self) -> list[str]:
        """Start an actor for each engine and return their names. Beside learners Ray's GPUs are the learners', and an
        engine receives the numbers of its own."""
        cores = self.config.trainer.cpu_threads or os.cpu_count() or 1
        if self.engine_groups:
            places = [(group, index) for group in self.engine_groups for index in range(group.bundle_count)]
            each = [(place, (), max(1, cores // place[0].bundle_count)) for place in places]
        elif self.device.type == "cuda":
            gpus = self.watch.call("start", "gpus", {rank_name(r): (ray.get_gpu_ids,) for r in range(self.ranks)})
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

    def _start_reward_model(self) -> RayRewardModel:
        """Start the reward model, on a GPU of its own where there are any: it works while the engines decode."""
        gpus = 1 if self.device.type == "cuda" else 0
        actor = REWARD_MODEL.options(num_cpus=0, num_gpus=gpus).remote(self.config, self.device, self.threads)
        self.watch.add(RayRewardModel.NAME, actor)
        self.watch.call("load", "ready", {RayRewardModel.NAME: ()})
        return RayRewardModel(self.watch)

    def close(self) -> None:
        """End the actors and what else this object started. A second call does nothing."""
        if not ray.is_initialized():
            return
        if self.engine is not None:
            self.engine.close()
        timeline = self.config.ray_kwargs.timeline_json_file
        if timeline and self.watch.actors:
            try:  # for chrome://tracing or Perfetto; without it a run is none the worse
                path = Path(timeline).expanduser()
                path.parent.mkdir(parents=True, exist_ok=True)
                ray.timeline(filename=str(path))
            except (RayError, OSError) as error:
                log.warning("ray_kwargs.timeline_json_file=%s was not written: %s", path, error)
        for actor in self.watch.actors.values():
            ray.kill(actor)
        for group in self.groups + self.engine_groups:
            remove_placement_group(group)
        self.watch.actors, self.learners, self.groups, self.engine_groups, self.engine = {}, [], [], [], None
        if self.owns_ray:
            ray.shutdown()
