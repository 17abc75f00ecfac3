"""The processes of a run on Ray: a connection, pools of nodes, and an actor for each learner rank
and engine.

By default the engines sit beside the ranks and alternate with them on their GPUs (on the CPU: on
the node's cores); with ``hybrid_engine=False`` they have a pool of their own. Rank 0 is on the
driver's node where there is room.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.checkpoint.store import LOCK
from core.cluster.processes import FOLDER, EngineProcess, Facts, LearnerProcess, RewardModelProcess
from core.cluster.ray_engine import REWARD_MODEL, RayEngine, score_over_ray
from core.cluster.ray_nodes import INIT, check_nodes, free_nodes, of_ray, recorded, start_problems
from core.cluster.ray_watch import LOOK_S, Place, Watch
from core.cluster.split_layers import check_layers
from core.config import registry
from core.config.paths import address_problem, cluster_address, run_folder
from core.config.section import show, thaw
from core.errors import InputError, NoRoom, one_line
from core.secret_keys import without_secrets
from core.tracking.run_manifest import ROOT

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.rewards.grading import RewardModelCall

log = logging.getLogger(__name__)

WAIT_KEY = "trainer.wait_for_nodes_s"
WAIT_S = 0.5
FIRST_LOOK_S = 5.0  # after which a start that waits says what for, and again every LOOK_S


def actor_class(body: type) -> Any:
    """Return an actor class with a thread beside its work, which the liveness holds."""
    return ray.remote(concurrency_groups={"aside": 1})(body)


def rank_name(rank: int) -> str:
    return f"learner rank {rank}"


LEARNER, ENGINE, SCORER = map(actor_class, (LearnerProcess, EngineProcess, RewardModelProcess))


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Block in children what a terminal or scheduler sends to a whole group: a stop finishes its
    step with them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connect(config: Config, device: torch.device) -> None:
    """Connect to the cluster that ``ray_kwargs.ray_init.address`` or RAY_ADDRESS names, or start a
    local Ray.

    On a cluster, processes find this code under the same path and start in the same folder as this
    one, unless ``runtime_env`` has a ``working_dir``. Raises InputError, also where a run on
    several nodes names no cluster.
    """
    if problem := address_problem(config):
        raise InputError(str(problem))
    if problems := start_problems(config):
        raise InputError(problems)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {
        name: value for name, value in thaw(config.ray_kwargs.ray_init).items() if value is not None
    }
    if cluster_address(config) is None:
        options["address"] = "local"  # and not what else may be found on this machine
        options.setdefault("include_dashboard", False)
        # Ray's CPUs are tickets: more ranks than cores are slow, not impossible
        if device.type == "cpu":
            trainer, part = config.trainer, config.actor_rollout_ref
            apart = 0 if part.hybrid_engine else part.rollout.nnodes * part.rollout.n_gpus_per_node
            options.setdefault(
                "num_cpus",
                max(trainer.nnodes * trainer.n_gpus_per_node + apart, os.cpu_count() or 1),
            )
    else:
        environment = options.setdefault("runtime_env", {})
        if "working_dir" not in environment:
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            variables = {
                name: str(value) for name, value in environment.get("env_vars", {}).items()
            }
            environment["env_vars"] = {"PYTHONPATH": path, FOLDER: os.getcwd(), **variables}
    try:
        with kept_from_children():
            ray.init(**{"logging_level": logging.WARNING, **options})
    except (OSError, RayError, RuntimeError, TypeError, ValueError) as error:
        # Also of another version of Ray
        reason = one_line(" ".join(without_secrets(str(error), options, INIT).split()))
        raise InputError(f"{INIT}={show(options, INIT)}: {reason}") from None


class Pool:
    """The processes of a section's nodes, of ``gpus`` GPUs each: a placement group a node, a bundle
    a process."""

    def __init__(self, key: str, section: Any, gpus: int, on_gpus: bool):
        self.key, self.gpus = key, gpus if on_gpus else 0
        self.nodes, self.per_node = section.nnodes, section.n_gpus_per_node // gpus
        self.groups: list[Any] = []

    @property
    def asked(self) -> str:
        """Return the keys that decide the size, with their values."""
        return (
            f"{self.key}.nnodes={self.nodes} "
            f"{self.key}.n_gpus_per_node={self.per_node * max(1, self.gpus)}"
        )

    def place(self, index: int, *, beside: bool = False) -> dict[str, Any]:
        """Return the options of the actor in bundle ``index``. One ``beside`` another gets no GPU
        of Ray's."""
        node, bundle = divmod(index, self.per_node)
        strategy = PlacementGroupSchedulingStrategy(
            self.groups[node], placement_group_bundle_index=bundle
        )
        return {
            "scheduling_strategy": strategy,
            "num_cpus": 0.5,
            "num_gpus": 0 if beside else self.gpus,
        }


def reserve(pools: Sequence[Pool], first_on: str | None, timeout_s: float) -> None:
    """Create the pools' placement groups, the first one on a named node if it has room, and wait.
    Raises NoRoom."""
    for pool in pools:
        bundle = {"CPU": 1.0, **({"GPU": float(pool.gpus)} if pool.gpus else {})}
        for _ in range(pool.nodes):
            # Ray's public argument (bundle_label_selector) would let a run wait for this node where
            # others are free
            bundles = [bundle] * pool.per_node
            pool.groups.append(
                placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=first_on)
            )
            first_on = None
    waiting = [group for pool in pools for group in pool.groups]
    start = time.monotonic()
    next_look = start + FIRST_LOOK_S
    # In short waits, because a Ctrl-C is answered between them only
    while waiting and time.monotonic() < start + timeout_s:
        if waiting[0].wait(WAIT_S):
            waiting.pop(0)
        elif time.monotonic() > next_look:
            log.warning(
                "%s; waiting for up to %g s (%s)", shortage(pools, waiting), timeout_s, WAIT_KEY
            )
            next_look += LOOK_S
    if waiting:
        fix = f"ask for less, or raise {WAIT_KEY}={timeout_s:g} to wait longer"
        raise NoRoom(f"{shortage(pools, waiting)}; {fix}")


def shortage(pools: Sequence[Pool], waiting: Sequence[Any]) -> str:
    """Return what the run asks for and lacks: nodes that have gone, and what is free beside its
    own."""
    nodes = sum(pool.nodes for pool in pools)
    asked = " ".join(pool.asked for pool in pools)
    return (
        f"{asked}: {nodes - len(waiting)} of {nodes} nodes have room; "
        f"{free_nodes(any(p.gpus for p in pools))}"
    )


def nodes_of(pools: Iterable[Pool]) -> list[str]:
    """Return the ids of the nodes on which the pools have bundles."""
    tables = [placement_group_table(group) for pool in pools for group in pool.groups]
    return list(
        dict.fromkeys(node for table in tables for node in table["bundles_to_node_id"].values())
    )


class RayProcesses:
    """The actors of a run, from the connection to their end.

    An engine computes on ``rollout.tensor_model_parallel_size`` GPUs of its pool, hf on one; on the
    CPU a node that engines share with learners has one engine with all of the node's threads.
    ``learner`` are keyword arguments of :class:`core.cluster.learner_rank.LearnerRank`. With
    ``learners=False`` there are engines alone, which read their own weights. Starts Ray, or
    connects to a cluster, unless that was done already, and ends what it started. Raises InputError
    where there is no room.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        device: torch.device,
        *,
        learners: bool = True,
        **learner: Any,
    ):
        trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
        self.config, self.device = config, device
        self.per_node = trainer.n_gpus_per_node
        self.ranks = trainer.nnodes * trainer.n_gpus_per_node if learners else 0
        # Of torch in rank 0, once it is there; ranks on nodes with more cores have more
        self.threads = 0
        self.watch = Watch(trainer.phase_timeout_s)
        self.learners: list[Any] = []
        self.address: tuple[str, int] | None = None  # where the ranks meet
        splits = "tensor_model_parallel_size" in registry.ENGINES[rollout.name].reads
        self.engine_gpus = rollout.tensor_model_parallel_size if splits else 1  # of each engine
        self.engine: RayEngine | None = None
        self.reward_model: RewardModelCall | None = None
        self.pools: dict[str, Pool] = {}
        self.nodes: list[dict[str, Any]] = []  # what the run's manifest has of them
        self.owns_ray = not ray.is_initialized()
        try:
            if learners:
                check_layers(config)
            if self.owns_ray:
                connect(config, device)
            # This machine need not have one
            if trainer.device is None and ray.cluster_resources().get("GPU"):
                self.device = torch.device("cuda")
            on_gpus = self.device.type == "cuda"
            if learners:
                self.pools["ranks"] = Pool("trainer", trainer, 1, on_gpus)
            if not (learners and config.actor_rollout_ref.hybrid_engine):
                key, section = (
                    ("actor_rollout_ref.rollout", rollout) if learners else ("trainer", trainer)
                )
                self.pools["engines"] = Pool(key, section, self.engine_gpus, on_gpus)
            here = ray.get_runtime_context().get_node_id() if learners else None
            reserve([*self.pools.values()], here, trainer.wait_for_nodes_s)
            reports = check_nodes(config, nodes_of(self.pools.values()))
            self._start(learner)
            # On a GPU of its own: it works while the engines decode
            if config.reward_model.loads_model:
                actor = SCORER.options(num_cpus=0, num_gpus=int(on_gpus)).remote(*self._cores())
                self.watch.add(REWARD_MODEL, actor)
                self._facts([REWARD_MODEL])
                self.watch.call("load", "load", {REWARD_MODEL: (config, self.device)})
                self.reward_model = partial(score_over_ray, self.watch)
            self.nodes = recorded(reports, self.watch.places)
        except BaseException:
            self.close()
            raise

    @property
    def _engines_sleep(self) -> bool:
        """Return whether the engines leave their GPUs' memory to the learners while these work."""
        part = self.config.actor_rollout_ref
        shared = bool(self.ranks) and part.hybrid_engine and self.device.type == "cuda"
        return shared and part.rollout.free_cache_engine

    def _start(self, learner: dict[str, Any]) -> None:
        """Load the engines, put them to sleep where they share GPUs, then load the learners.

        The learners' actors are there before, because the engines' GPUs are theirs, but hold
        nothing on a GPU yet.
        """
        for rank in range(self.ranks):
            self.learners.append(
                LEARNER.options(**self.pools["ranks"].place(rank)).remote(*self._cores())
            )
            self.watch.add(rank_name(rank), self.learners[-1])
        facts = self._facts([*self.watch.actors])
        engines: list[str] = []
        for place, *process in self._engine_places(facts) if self.config.needs_engine else ():
            engines.append(f"engine {len(engines)}")
            self.watch.add(
                engines[-1], ENGINE.options(**place).remote(self.config, self.device, *process)
            )
        self._facts(engines)
        # Alone on its GPU vLLM measures its cache correctly; kv_cache_memory_bytes would skip that
        # and the utilization.
        self.watch.call("load", "start", dict.fromkeys(engines, (not self.learners,)))
        self.engine = RayEngine(self.watch, engines)
        if self._engines_sleep:
            self.engine.sleep()
        if self.learners:
            self.threads = facts[0].threads
            (self.address,) = self.watch.call(
                "start", "host", {rank_name(0): (ray.util.get_node_ip_address,)}
            )
            joining = (self.address, self.config, self.device)
            calls = {
                rank_name(r): one.join.remote(r, *joining, **learner)
                for r, one in enumerate(self.learners)
            }
            self.watch.wait("load", calls)

    def _cores(self) -> tuple[int | None, int]:
        """Return the cores that a process beside the ranks counts, and into how many parts it
        divides them."""
        cores = self.config.trainer.cpu_threads
        return cores, 1 if cores else self.per_node

    def _facts(self, names: Collection[str]) -> list[Facts]:
        """Return what actors report of themselves. Raises InputError for a rank that does not see a
        claimed folder."""
        folder = run_folder(self.config).absolute()
        reports = self.watch.call(
            "start", "facts", dict.fromkeys(names, (of_ray, str(folder / LOCK)))
        )
        for name, facts in zip(names, reports, strict=True):
            self.watch.places[name] = Place(facts.node_id, facts.address, facts.pid)
            if name.startswith("learner") and (folder / LOCK).exists() and not facts.sees:
                raise InputError(
                    f"trainer.default_local_dir={folder}: {self.watch.named(name)} cannot see "
                    f"this folder, and every "
                    "rank writes its part of a checkpoint there; set it to one that all nodes share"
                )
        return reports

    def _engine_places(
        self, ranks: Sequence[Facts]
    ) -> Iterator[tuple[dict[str, Any], int | None, int, list[Any]]]:
        """Yield for each engine where it is, its cores and their parts, and its GPUs where they are
        the ranks'."""
        cores, each = self.config.trainer.cpu_threads, self.engine_gpus
        if pool := self.pools.get("engines"):
            yield from (
                (pool.place(at), cores, pool.per_node, [])
                for at in range(pool.nodes * pool.per_node)
            )
            return
        pool = self.pools["ranks"]
        each, process = (
            (each, self._cores()) if self.device.type == "cuda" else (self.per_node, (cores, 1))
        )
        for rank in range(0, self.ranks, each):
            gpus = [gpu for one in ranks[rank : rank + each] for gpu in one.gpus]
            yield pool.place(rank, beside=True), *process, gpus

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
        self.watch.actors, self.learners, self.engine, self.pools = {}, [], None, {}
        if self.owns_ray:
            ray.shutdown()
