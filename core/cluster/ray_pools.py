"""The actors of a run on Ray: the connection, pools of nodes, and what runs where.

By default the engines sit beside the ranks and alternate with them on their GPUs, or on a node's
cores. With ``hybrid_engine=False`` they have a pool of their own. Rank 0 is on the driver's node
where there is room.
"""

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.checkpoint.store import LOCK
from core.cluster.ray_engine import REWARD_MODEL, RayEngine, score_over_ray
from core.cluster.ray_nodes import INIT, check_nodes, free_nodes, recorded, start_problems
from core.cluster.ray_processes import FOLDER, EngineProcess, LearnerProcess, RewardModelProcess
from core.cluster.ray_watch import LOOK_S, Place, Watch
from core.cluster.split_layers import check_layers
from core.config import registry
from core.config.paths import address_problem, cluster_address, run_folder
from core.config.schema import Config
from core.config.section import show
from core.errors import InputError, NoRoom, one_line
from core.rewards.grading import RewardModelCall
from core.secret_keys import without_secrets
from core.tracking.run_manifest import ROOT

log = logging.getLogger(__name__)

WAIT_KEY = "trainer.wait_for_nodes_s"
WAIT_S = 0.5
FIRST_LOOK_S = 5.0  # after which a waiting start logs what it waits for, and again every LOOK_S


def actor_class(body: type) -> Any:
    """Return an actor class with a thread beside its work, which the liveness holds."""
    return ray.remote(concurrency_groups={"aside": 1})(body)


def rank_name(rank: int) -> str:
    return f"learner rank {rank}"


LEARNER = actor_class(LearnerProcess)
ENGINE = actor_class(EngineProcess)
SCORER = actor_class(RewardModelProcess)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Block, in children, the signals that a terminal or scheduler sends to a whole group.

    A run that is asked to stop needs its processes to finish the step.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connect(config: Config, device: torch.device) -> None:
    """Connect to the cluster that the configuration or RAY_ADDRESS names, or start a local Ray.

    On a cluster, processes find this code under the same path and start in the same folder as this
    one, unless ``runtime_env`` has a ``working_dir``. Raises InputError, also where a run on
    several nodes names no cluster.
    """
    if problem := address_problem(config):
        raise InputError(str(problem))
    if problems := start_problems(config):
        raise InputError(problems)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = deepcopy(config.ray_kwargs.ray_init)
    options = {name: value for name, value in options.items() if value is not None}
    if cluster_address(config) is None:
        options["address"] = "local"  # and not another Ray of this machine
        options.setdefault("include_dashboard", False)
        if device.type == "cpu":  # more ranks than cores are slow, not impossible
            trainer = config.trainer
            part = config.actor_rollout_ref
            processes = trainer.nnodes * trainer.n_gpus_per_node
            if not part.hybrid_engine:
                processes += part.rollout.nnodes * part.rollout.n_gpus_per_node
            processes += config.reward_model.loads_model
            options.setdefault("num_cpus", max(processes, os.cpu_count() or 1))
    else:
        environment = options.setdefault("runtime_env", {})
        if "working_dir" not in environment:
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            variables = {"PYTHONPATH": path, FOLDER: os.getcwd()}
            for name, value in environment.get("env_vars", {}).items():
                variables[name] = str(value)
            environment["env_vars"] = variables
    try:
        with kept_from_children():
            ray.init(**{"logging_level": logging.WARNING, **options})
    # RuntimeError: for example another version of Ray on the cluster
    except (OSError, RayError, RuntimeError, TypeError, ValueError) as error:
        reason = one_line(" ".join(without_secrets(str(error), options, INIT).split()))
        raise InputError(f"{INIT}={show(options, INIT)}: {reason}") from None


class Pool:
    """The nodes of a configuration section: a placement group a node, a bundle a process.

    Each process has ``gpus`` GPUs.
    """

    def __init__(self, key: str, section: Any, gpus: int, on_gpus: bool):
        self.gpus = gpus if on_gpus else 0
        self.nodes = section.nnodes
        self.per_node = section.n_gpus_per_node // gpus
        self.size = self.nodes * self.per_node
        nnodes = section.nnodes
        n_gpus = self.per_node * max(1, self.gpus)
        self.keys = f"{key}.nnodes={nnodes} {key}.n_gpus_per_node={n_gpus}"
        self.groups: list[Any] = []

    def place(self, index: int, *, beside: bool = False) -> dict[str, Any]:
        """Return the options of an actor in bundle ``index``.

        An actor ``beside`` another gets no GPU from Ray.
        """
        node, bundle = divmod(index, self.per_node)
        group = self.groups[node]
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
            "num_cpus": 0.5,
            "num_gpus": 0 if beside else self.gpus,
        }


def reserve(pools: Sequence[Pool], first_on: str | None, timeout_s: float) -> None:
    """Create the pools' placement groups and wait for them.

    The first group is on the node ``first_on`` if that has room. Raises NoRoom.
    """
    for pool in pools:
        bundle = {"CPU": 1.0, **({"GPU": float(pool.gpus)} if pool.gpus else {})}
        for _ in range(pool.nodes):
            # With Ray's public argument (bundle_label_selector) a run would wait for this node
            # where others are free
            options = {"strategy": "STRICT_PACK", "_soft_target_node_id": first_on}
            pool.groups.append(placement_group([bundle] * pool.per_node, **options))
            first_on = None
    waiting = [group for pool in pools for group in pool.groups]
    start = time.monotonic()
    next_look = start + FIRST_LOOK_S
    # In short waits, because a Ctrl-C is answered between them only
    while waiting and time.monotonic() < start + timeout_s:
        if waiting[0].wait(WAIT_S):
            waiting.pop(0)
        elif time.monotonic() > next_look:
            lacks = shortage(pools, waiting)
            log.warning("%s; waiting for up to %g s (%s)", lacks, timeout_s, WAIT_KEY)
            next_look += LOOK_S
    if waiting:
        fix = f"ask for less, or raise {WAIT_KEY}={timeout_s:g} to wait longer"
        raise NoRoom(f"{shortage(pools, waiting)}; {fix}")


def shortage(pools: Sequence[Pool], waiting: Sequence[Any]) -> str:
    """Return what the run asks for and lacks: nodes that have gone, and what is free."""
    nodes = sum(pool.nodes for pool in pools)
    keys = " ".join(pool.keys for pool in pools)
    free = free_nodes(any(pool.gpus for pool in pools))
    return f"{keys}: {nodes - len(waiting)} of {nodes} nodes have room; {free}"


def nodes_of(pools: Iterable[Pool]) -> list[str]:
    """Return the ids of the nodes on which the pools have bundles."""
    tables = [placement_group_table(group) for pool in pools for group in pool.groups]
    nodes = [node for table in tables for node in table["bundles_to_node_id"].values()]
    return list(dict.fromkeys(nodes))


class RayProcesses:
    """The actors of a run, from the connection to their end.

    An engine computes on ``rollout.tensor_model_parallel_size`` GPUs of its pool, hf on one. On the
    CPU a node that engines share with learners has one engine with all of the node's threads. With
    ``learners=False`` there are engines alone, which read their own weights. ``learner`` are
    keyword arguments of :class:`core.cluster.learner_rank.LearnerRank`.

    Starts Ray, or connects to a cluster, unless that was done already, and ends what it started.
    Raises InputError where there is no room.
    """

    def __init__(
        self, config: Config, device: torch.device, *, learners: bool = True, **learner: Any
    ):
        trainer = config.trainer
        rollout = config.actor_rollout_ref.rollout
        self.config = config
        self.device = device
        self.per_node = trainer.n_gpus_per_node
        self.ranks = trainer.nnodes * trainer.n_gpus_per_node if learners else 0
        self.threads = 0  # of torch in rank 0, once it is there
        self.watch = Watch(trainer.phase_timeout_s)
        self.learners: list[Any] = []
        self.address: tuple[str, int] | None = None  # where the ranks meet
        splits = "tensor_model_parallel_size" in registry.ENGINES[rollout.name].reads
        self.engine_gpus = rollout.tensor_model_parallel_size if splits else 1  # of each engine
        self.engine: RayEngine | None = None
        self.reward_model: RewardModelCall | None = None
        self.pools: dict[str, Pool] = {}
        self.nodes: list[dict[str, Any]] = []  # what the run's manifest holds of the nodes
        self.owns_ray = not ray.is_initialized()
        try:
            if learners:
                check_layers(config)
            if self.owns_ray:
                connect(config, device)
            if trainer.device is None and ray.cluster_resources().get("GPU"):
                self.device = torch.device("cuda")  # the driver's machine need not have one
            self._reserve()
            reports = check_nodes(config, nodes_of(self.pools.values()))
            self._start(learner)
            if config.reward_model.loads_model:
                self._start_reward_model()
            self.nodes = recorded(reports, self.watch.places)
        except BaseException:
            self.close()
            raise

    @property
    def engines_sleep(self) -> bool:
        """Return whether the engines leave their GPUs' memory to the learners while these work."""
        part = self.config.actor_rollout_ref
        shares_gpus = self.ranks > 0 and part.hybrid_engine and self.device.type == "cuda"
        return shares_gpus and part.rollout.free_cache_engine

    def _reserve(self) -> None:
        """Reserve the nodes of ranks and engines."""
        trainer = self.config.trainer
        part = self.config.actor_rollout_ref
        on_gpus = self.device.type == "cuda"
        home = None
        if self.ranks:
            self.pools["ranks"] = Pool("trainer", trainer, 1, on_gpus)
            home = ray.get_runtime_context().get_node_id()
            if not part.hybrid_engine:
                key = "actor_rollout_ref.rollout"
                self.pools["engines"] = Pool(key, part.rollout, self.engine_gpus, on_gpus)
        else:
            self.pools["engines"] = Pool("trainer", trainer, self.engine_gpus, on_gpus)
        if self.config.reward_model.loads_model:
            one = SimpleNamespace(nnodes=1, n_gpus_per_node=1)
            self.pools["reward model"] = Pool("reward_model", one, 1, on_gpus)
            self.pools["reward model"].keys = "reward_model.enable=True: one more"
        reserve([*self.pools.values()], home, trainer.wait_for_nodes_s)

    def _start(self, learner: dict[str, Any]) -> None:
        """Load the engines, put them to sleep where they share GPUs, then load the learners.

        The learners' actors exist before, because Ray gives them the engines' GPUs, but they hold
        nothing on a GPU yet.
        """
        for rank in range(self.ranks):
            options = self.pools["ranks"].place(rank)
            self.learners.append(LEARNER.options(**options).remote(*self._cores()))
            self.watch.add(rank_name(rank), self.learners[-1])
        ranks = self._report([*self.watch.actors])
        engines: list[str] = []
        for options, *process in self._engine_places(ranks) if self.config.needs_engine else ():
            engines.append(f"engine {len(engines)}")
            actor = ENGINE.options(**options).remote(self.config, self.device, *process)
            self.watch.add(engines[-1], actor)
        self._report(engines)
        # Alone on its GPU vLLM measures its cache correctly. kv_cache_memory_bytes would skip that
        # measurement, and the utilization with it.
        self.watch.call("load", "start", dict.fromkeys(engines, (not self.learners,)))
        self.engine = RayEngine(self.watch, engines)
        if self.engines_sleep:
            self.engine.sleep()
        if self.learners:
            self.threads = ranks[0].threads
            (self.address,) = self.watch.call("start", "host", {rank_name(0): ()})
            calls = {}
            for rank, actor in enumerate(self.learners):
                joining = rank, self.address, self.config, self.device
                calls[rank_name(rank)] = actor.join.remote(*joining, **learner)
            self.watch.wait("load", calls)

    def _start_reward_model(self) -> None:
        """Load the reward model, on a GPU of its own: it works while the engines decode."""
        actor = SCORER.options(**self.pools["reward model"].place(0)).remote(*self._cores())
        self.watch.add(REWARD_MODEL, actor)
        self._report([REWARD_MODEL])
        self.watch.call("load", "load", {REWARD_MODEL: (self.config, self.device)})
        self.reward_model = partial(score_over_ray, self.watch)

    def _cores(self) -> tuple[int | None, int]:
        """Return the cores of a process among those of a node's ranks, and into how many parts.

        ``trainer.cpu_threads`` are those of one process; without it a node's cores are shared.
        """
        cores = self.config.trainer.cpu_threads
        return cores, 1 if cores else self.per_node

    def _report(self, names: Collection[str]) -> list[Place]:
        """Return where actors are. Raises InputError for a rank that lacks the run's folder."""
        folder = run_folder(self.config).absolute()
        lock = folder / LOCK
        places = self.watch.call("start", "facts", dict.fromkeys(names, (str(lock),)))
        for name, place in zip(names, places, strict=True):
            self.watch.places[name] = place
            if name.startswith("learner") and lock.exists() and not place.sees_path:
                raise InputError(
                    f"trainer.default_local_dir={folder}: {self.watch.named(name)} cannot see this "
                    "folder, and every rank writes its part of a checkpoint there; set it to one "
                    "that all nodes share"
                )
        return places

    def _engine_places(
        self, ranks: Sequence[Place]
    ) -> Iterator[tuple[dict[str, Any], int | None, int, list[int | str]]]:
        """Yield for each engine its options, its cores, their parts, and the GPUs of ranks."""
        cores = self.config.trainer.cpu_threads
        if pool := self.pools.get("engines"):
            for index in range(pool.size):
                yield pool.place(index), cores, pool.per_node, []
            return
        size = self.per_node  # of the ranks beside one engine
        process = cores, 1
        if self.device.type == "cuda":
            size = self.engine_gpus
            process = self._cores()
        for first in range(0, self.ranks, size):
            gpus = [gpu for place in ranks[first : first + size] for gpu in place.gpus]
            yield self.pools["ranks"].place(first, beside=True), *process, gpus

    def close(self) -> None:
        """End the actors and what else this object started. A second call does nothing."""
        if not ray.is_initialized():
            return
        if self.engine is not None:
            self.engine.close()
        for actor in self.watch.actors.values():
            ray.kill(actor)
        for pool in self.pools.values():
            for group in pool.groups:
                remove_placement_group(group)
        self.watch.actors = {}
        self.learners = []
        self.engine = None
        self.pools = {}
        if self.owns_ray:
            ray.shutdown()
