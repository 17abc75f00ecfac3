"""The processes of a run on Ray: a connection, pools of nodes, and an actor for each learner rank and engine.

A pool has a placement group for each of its nodes, with a bundle for each process. By default the engines sit beside
the ranks and alternate with them on their GPUs (or, on the CPU, on the node's cores); with ``hybrid_engine=False`` they
have a pool of their own. The driver runs where it was started, and rank 0 is on its node where there is room.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.checkpoint.store import LOCK
from core.cluster.processes import FOLDER, EngineProcess, Facts, LearnerProcess, RewardModelProcess, code_of_here
from core.cluster.ray_engine import RayEngine, RayRewardModel
from core.cluster.ray_watch import Watch
from core.config import registry
from core.config.paths import address_problem, cluster_address, run_folder
from core.config.section import thaw
from core.errors import InputError
from core.tracking.run_manifest import ROOT

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)

START_S = 300.0  # for the cluster to have room
WAIT_S = 0.5


def actor_class(body: type) -> Any:
    """Return an actor class with two threads beside its work: one is held by the liveness, one answers."""
    return ray.remote(concurrency_groups={"aside": 2})(body)


def rank_name(rank: int) -> str:
    return f"learner rank {rank}"


LEARNER, ENGINE, REWARD_MODEL = map(actor_class, (LearnerProcess, EngineProcess, RewardModelProcess))


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Block for the processes that are started while entered what a terminal or a scheduler sends to all of a group.

    The step that is finished still needs them. A mask is inherited, a handler is not.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connect(config: Config, device: torch.device) -> None:
    """Connect to the cluster that ``ray_kwargs.ray_init.address`` or RAY_ADDRESS names, or start a local Ray.

    ``ray_kwargs.ray_init`` goes to ``ray.init`` unchanged. On a cluster, processes find this code under the same path
    and start in the same folder as this one, unless ``runtime_env`` has a ``working_dir``. Raises InputError,
    also where a run on several nodes names no cluster.
    """
    if problem := address_problem(config):
        raise InputError(str(problem))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {name: value for name, value in thaw(config.ray_kwargs.ray_init).items() if value is not None}
    if cluster_address(config) is None:
        options["address"] = "local"  # and not what else may be found on this machine
        options.setdefault("include_dashboard", False)
        if device.type == "cpu":  # Ray's CPUs are tickets: more ranks than cores are slow, not impossible
            trainer, part = config.trainer, config.actor_rollout_ref
            apart = 0 if part.hybrid_engine else part.rollout.nnodes * part.rollout.n_gpus_per_node
            apart += config.reward_model.ranks if config.reward_model.loads_model else 0
            options.setdefault("num_cpus", max(trainer.nnodes * trainer.n_gpus_per_node + apart, os.cpu_count() or 1))
    else:
        environment = options.setdefault("runtime_env", {})
        if "working_dir" not in environment:
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            variables = {name: str(value) for name, value in environment.get("env_vars", {}).items()}
            environment["env_vars"] = {"PYTHONPATH": path, FOLDER: os.getcwd(), **variables}
    try:
        with kept_from_children():
            ray.init(**{"logging_level": logging.WARNING, **options})
    except (ConnectionError, ValueError, TypeError) as error:  # no such cluster, or an argument it does not take
        hint = "; where `ray start` made the cluster ask for a token, set RAY_AUTH_MODE=token"
        hint = hint if isinstance(error, ConnectionError) else ""
        raise InputError(f"ray_kwargs.ray_init={options}: {error}{hint}") from error


class NodePool:
    """``nodes`` with ``per_node`` bundles each, for processes of ``gpus`` GPUs where there are any.

    The first node is ``first_on`` if there is room: Ray's public argument (``bundle_label_selector``) would let a run
    wait for this node where others are free.
    """

    def __init__(self, device: torch.device, nodes: int, per_node: int, gpus: int = 1, first_on: str | None = None):
        self.per_node, self.gpus = per_node, gpus if device.type == "cuda" else 0
        bundle = {"CPU": 1.0, **({"GPU": float(gpus)} if self.gpus else {})}
        targets = [first_on, *[None] * (nodes - 1)]
        self.groups = [
            placement_group([bundle] * per_node, strategy="STRICT_PACK", _soft_target_node_id=node) for node in targets
        ]

    def __len__(self) -> int:
        return len(self.groups) * self.per_node

    def place(self, index: int, *, beside: bool = False) -> dict[str, Any]:
        """Return the options of the actor in bundle ``index``. One ``beside`` another gets no GPU of Ray's."""
        node, bundle = divmod(index, self.per_node)
        strategy = PlacementGroupSchedulingStrategy(self.groups[node], placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy, "num_cpus": 0.5, "num_gpus": 0 if beside else self.gpus}

    def remove(self) -> None:
        for group in self.groups:
            remove_placement_group(group)


def wait_for_room(config: Config, pools: Mapping[str, NodePool]) -> None:
    """Wait until the pools are there; ``pools`` maps the keys that size one to it. Raises InputError."""
    waiting = [group for pool in pools.values() for group in pool.groups]
    deadline = time.monotonic() + min(START_S, config.trainer.phase_timeout_s)
    while waiting and time.monotonic() < deadline:  # in short waits, because a Ctrl-C is answered between them only
        if waiting[0].wait(WAIT_S):
            waiting.pop(0)
    if waiting:
        raise InputError(
            f"{' '.join(pools)}: no room for that many bundles on that many nodes; the cluster has "
            f"{ray.cluster_resources()} in all and {ray.available_resources()} left. Ask for less, or wait for other "
            "runs to end"
        )


class RayProcesses:
    """The actors of a run, from the connection to their end.

    An engine computes on ``rollout.tensor_model_parallel_size`` GPUs of its pool, hf on one; on the CPU a node that
    engines share with learners has one engine with all of the node's threads. ``learner`` are keyword arguments of
    :class:`core.cluster.learner_rank.LearnerRank`. With ``learners=False`` there are engines alone, which read their
    own weights: on GPUs as many as have room, on the CPU ``trainer.n_gpus_per_node`` a node.
    Starts a local Ray unless ``ray_kwargs.ray_init.address`` names a cluster or one is connected to already, and
    ends what it started. Raises InputError where there is no room.
    """

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, *, learners: bool = True, **learner: Any):
        trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
        self.config, self.device = config, device
        self.per_node = trainer.n_gpus_per_node
        self.ranks = trainer.nnodes * trainer.n_gpus_per_node if learners else 0
        self.threads = 0  # of torch in rank 0, once it is there; ranks on nodes with more cores have more
        self.watch = Watch(trainer.phase_timeout_s, trainer.heartbeat_timeout_s)
        self.learners: list[Any] = []
        self.address: tuple[str, int] | None = None  # where the ranks meet
        splits = "tensor_model_parallel_size" in registry.ENGINES[rollout.name].reads
        self.engine_gpus = rollout.tensor_model_parallel_size if splits else 1  # of each engine
        self.engine: RayEngine | None = None
        self.reward_model: RayRewardModel | None = None
        self.pools: dict[str, NodePool] = {}  # ranks, engines, reward; the last two may be beside the ranks
        self.owns_ray = not ray.is_initialized()
        try:
            if learners:
                _check_layers(config)
            if self.owns_ray:
                connect(config, device)
            if trainer.device is None and ray.cluster_resources().get("GPU"):  # this machine need not have one
                self.device = torch.device("cuda")
            self._reserve()
            self._start(learner)
            if config.reward_model.loads_model:
                self.reward_model = self._start_reward_model()
        except BaseException:
            self.close()
            raise

    @property
    def _engines_sleep(self) -> bool:
        """Return whether the engines leave their GPUs' memory to the learners while these work."""
        part = self.config.actor_rollout_ref
        shared = bool(self.ranks) and part.hybrid_engine and self.device.type == "cuda"
        return shared and part.rollout.free_cache_engine

    def _reserve(self) -> None:
        """Reserve the nodes of all pools, the first of the ranks' on the node of this process if it can be."""
        trainer, part, reward = self.config.trainer, self.config.actor_rollout_ref, self.config.reward_model
        here, asked = ray.get_runtime_context().get_node_id(), {}

        def pool(name: str, section: Any, keys: str, gpus: int = 1, first_on: str | None = None) -> None:
            made = NodePool(self.device, section.nnodes, section.n_gpus_per_node // gpus, gpus, first_on)
            self.pools[name] = made
            asked[f"{keys}.nnodes={section.nnodes} {keys}.n_gpus_per_node={section.n_gpus_per_node}"] = made

        if self.ranks:
            pool("ranks", trainer, "trainer", first_on=here)
        else:
            pool("engines", trainer, "trainer", self.engine_gpus)
        if self.ranks and not part.hybrid_engine:
            pool("engines", part.rollout, "actor_rollout_ref.rollout", self.engine_gpus)
        if reward.loads_model and reward.enable_resource_pool:
            pool("reward", reward, "reward_model")
        wait_for_room(self.config, asked)

    def _start(self, learner: dict[str, Any]) -> None:
        """Load the engines, put them to sleep where they share GPUs, then load the learners.

        The learners' actors are there before, because the engines' GPUs are theirs, but hold nothing on a GPU yet.
        """
        cores, here = self.config.trainer.cpu_threads, self.pools.get("ranks")
        for rank in range(self.ranks):
            self.learners.append(LEARNER.options(**here.place(rank)).remote(cores, 1 if cores else self.per_node))
            self.watch.add(rank_name(rank), self.learners[-1])
        ranks = self._look(list(self.watch.actors), at_folder=True)
        engines: list[str] = []
        for place, parts, gpus in self._engine_places(ranks) if self.config.needs_engine else ():
            engines.append(f"engine {len(engines)}")
            self.watch.add(engines[-1], ENGINE.options(**place).remote(self.config, self.device, cores, parts, gpus))
        self._look(engines)
        # Alone on its GPU vLLM measures its cache correctly; kv_cache_memory_bytes would skip that and the utilization.
        self.watch.call("load", "start", dict.fromkeys(engines, (not self.learners,)))
        self.engine = RayEngine(self.watch, engines)
        if self._engines_sleep:
            self.engine.sleep()
        if self.learners:
            self.threads = ranks[0].threads
            (self.address,) = self.watch.call("start", "host", {rank_name(0): (ray.util.get_node_ip_address,)})
            joining = (self.address, self.config, self.device)
            calls = {rank_name(r): one.join.remote(r, *joining, **learner) for r, one in enumerate(self.learners)}
            self.watch.wait("load", calls)

    def _engine_places(self, ranks: Sequence[Facts]) -> Iterator[tuple[dict[str, Any], int, list[Any]]]:
        """Yield for each engine where it is, into how many parts its node's cores are divided, and its GPUs where Ray
        assigned them to ranks."""
        if "engines" in self.pools:
            pool = self.pools["engines"]
            yield from ((pool.place(index), pool.per_node, []) for index in range(len(pool)))
            return
        pool = self.pools["ranks"]
        if self.device.type == "cpu":
            yield from ((pool.place(rank, beside=True), 1, []) for rank in range(0, self.ranks, self.per_node))
            return
        parts = 1 if self.config.trainer.cpu_threads else self.per_node
        for rank in range(0, self.ranks, self.engine_gpus):
            yield (
                pool.place(rank, beside=True),
                parts,
                sum((one.gpus for one in ranks[rank : rank + self.engine_gpus]), []),
            )

    def _look(self, names: Sequence[str], *, at_folder: bool = False) -> list[Facts]:
        """Return what processes report of themselves; ``at_folder``: they write in the run folder, if it was claimed.

        Raises InputError for one that has other code than this process, or that does not see the folder.
        """
        folder = run_folder(self.config).absolute()
        asked = (ray.get_gpu_ids, str(folder / LOCK))
        found = self.watch.call("start", "facts", dict.fromkeys(names, asked))
        here, digest = code_of_here()
        for name, facts in zip(names, found, strict=True):
            if facts.digest != digest:
                raise InputError(
                    f"core={here}: {name} runs other code than this process, that of {facts.core}; install this "
                    "checkout where Ray's processes start (pip install -e .), or set PYTHONPATH to it"
                )
            if at_folder and (folder / LOCK).exists() and not facts.sees:
                raise InputError(
                    f"trainer.default_local_dir={folder}: {name} on {facts.machine} cannot see this folder, and every "
                    "rank writes its part of a checkpoint there; set it to a folder that all nodes share"
                )
        return found

    def _start_reward_model(self) -> RayRewardModel:
        """Start the reward model, on GPUs of its own where there are any: it works while the engines decode."""
        reward, cores, name = self.config.reward_model, self.config.trainer.cpu_threads, RayRewardModel.NAME
        places = {name: {"num_cpus": 0, "num_gpus": int(self.device.type == "cuda")}}
        if "reward" in self.pools:
            places = {f"{name} rank {rank}": self.pools["reward"].place(rank) for rank in range(reward.ranks)}
        for each, place in places.items():
            parts = 1 if cores else max(self.per_node, reward.n_gpus_per_node)
            self.watch.add(each, REWARD_MODEL.options(**place).remote(cores, parts))
        (address,) = self.watch.call("start", "host", {next(iter(places)): (ray.util.get_node_ip_address,)})
        joining = {each: (rank, address, self.config, self.device) for rank, each in enumerate(places)}
        self.watch.call("load", "join", joining)
        return RayRewardModel(self.watch, list(places))

    def close(self) -> None:
        """End the actors and what else this object started. A second call does nothing."""
        if not ray.is_initialized():
            return
        if self.engine is not None:
            self.engine.close()
        timeline = self.config.ray_kwargs.timeline_json_file
        if timeline and self.watch.actors:
            try:  # for chrome://tracing or Perfetto; without it a run is none the worse
                Path(timeline).expanduser().parent.mkdir(parents=True, exist_ok=True)
                ray.timeline(filename=str(Path(timeline).expanduser()))
            except (RayError, OSError) as error:
                log.warning("ray_kwargs.timeline_json_file=%s was not written: %s", timeline, error)
        for actor in self.watch.actors.values():
            ray.kill(actor)
        for pool in self.pools.values():
            pool.remove()
        self.watch.actors, self.learners, self.engine, self.pools = {}, [], None, {}
        if self.owns_ray:
            ray.shutdown()


def _check_layers(config: Config) -> None:
    """Check, on models without weights, that ranks can share layers where the configuration asks for it."""
    parts = (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic)
    if any(part.tensor_model_parallel_size > 1 for part in parts):
        from core.cluster.split_layers import check_layers

        check_layers(config, critic=config.critic.enable)
