"""The processes of a cluster: a learner rank, an engine, a reward model.

:mod:`core.cluster.ray_pools` makes Ray actors of these classes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch

from core.cluster.ray_watch import Place
from core.engines.engine import RolloutEngine, SampleRequest, make_engine
from core.engines.weight_buckets import GROUP, Bucket, Staging, Weight, staged_size
from core.learner.models import load_policy, load_tokenizer
from core.rewards.grading import Answer, Scores
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.cluster.learner_rank import LearnerRank
    from core.config.schema import Config
    from core.rewards.reward_model import RewardModel

# Environment: the driver's working directory, where relative paths of the configuration start
FOLDER = "RLREPRO_FOLDER"


class Process:
    """What all processes share: threads, a report of their place, and a sign of their end.

    A process uses one of ``parts`` equal parts of ``cores``, by default of its node's. ``gpus`` are
    the GPUs that it may use where Ray assigned them to other processes.
    """

    def __init__(self, cores: int | None, parts: int = 1, gpus: Sequence[int | str] = ()):
        folder = os.environ.get(FOLDER)
        if folder and os.path.isdir(folder):
            os.chdir(folder)
        self.threads = max(1, (cores or os.cpu_count() or 1) // parts)
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # for an engine's child processes
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        torch.set_num_threads(self.threads)  # Ray allows an actor one

    def liveness(self) -> None:
        """Block forever. Whoever waits for this call learns at once when the process dies."""
        threading.Event().wait()

    def facts(self, path: str) -> Place:
        """Return where this process is, and whether it sees ``path``, before a model loads."""
        return Place(
            node_id=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            threads=self.threads,
            gpus=tuple(ray.get_gpu_ids()),
            sees_path=os.path.exists(path),
        )


class LearnerProcess(Process):
    """A process for one :class:`core.cluster.learner_rank.LearnerRank`."""

    def __init__(self, cores: int | None, parts: int = 1):
        super().__init__(cores, parts)
        self.learner: LearnerRank | None = None
        self.store: torch.distributed.TCPStore | None = None  # where the ranks meet
        # In a weight sync: the buckets to come, and the memory that they fill in turn
        self.buckets: Iterator[Bucket] = iter(())
        self.staging: Staging | None = None

    def host(self) -> tuple[str, int]:
        """Open the store at which the ranks meet, on rank 0, and return its address."""
        address = ray.util.get_node_ip_address()
        self.store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def join(
        self,
        rank: int,
        address: tuple[str, int],
        config: Config,
        device: torch.device,
        **learner: Any,
    ) -> None:
        """Join the other ranks in a process group and make this rank's learner."""
        from core.cluster.learner_rank import LearnerRank

        if rank:
            self.store = torch.distributed.TCPStore(*address, is_master=False)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self.store,
            rank=rank,
            world_size=config.trainer.nnodes * config.trainer.n_gpus_per_node,
            timeout=timedelta(seconds=config.trainer.first_phase_s),
        )
        self.learner = LearnerRank(config, device, **learner)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.learner, method)(*arguments)

    def update(self, method: str, *arguments: Any) -> dict[str, float]:
        """Take the optimizer steps of the policy or the critic."""
        return getattr(self.learner.models, method)(*arguments)

    def run_pass(
        self, method: str, batch: TrainBatch, replies: bool, *arguments: str
    ) -> list[np.ndarray] | None:
        """Return what a pass computes at the policy's tokens of the batch, [M] each.

        Ranks that share the sequences have the same result, so only one of them ``replies``.
        """
        results = getattr(self.learner.models, method)(batch, *arguments)
        if not replies:
            return None
        results = results if isinstance(results, tuple) else (results,)
        return [value_N[batch.response_mask].numpy() for value_N in results]

    def begin_sync(
        self, dtype: torch.dtype, limit: int, stages: bool, broadcasts: bool
    ) -> list[Weight] | None:
        """Prepare to gather the policy's weights into buckets of ``limit`` bytes.

        A rank that ``stages`` keeps each bucket where engines can open it. Rank 0 returns what the
        weights are. Raises InputError for too small a limit.
        """
        weights = self.learner.weights(dtype)
        size = staged_size(weights, limit)
        self.staging = Staging(size, self.learner.device, broadcast=broadcasts) if stages else None
        self.buckets = self.learner.buckets(weights, limit, self.staging)
        torch.cuda.empty_cache()  # the engine that wakes for these weights needs the room
        return weights if self.learner.lead else None

    def next_bucket(self) -> Bucket | None:
        """Gather the next bucket and return where it is, or free the memory after the last."""
        bucket = next(self.buckets, None)
        if bucket is None:
            self.staging = None
            torch.cuda.empty_cache()
        return bucket

    def broadcast(self, size: int) -> None:
        """Send the bucket that was gathered last to the engines that wait for it."""
        GROUP.broadcast(self.staging.data[:size])

    def join_engines(self, size: int, timeout_s: float) -> None:
        """Join the group in which this rank broadcasts weights to all devices of engines."""
        GROUP.join((self.store.host, self.store.port), 0, size, self.learner.device, timeout_s)


class EngineProcess(Process):
    """A process for one rollout engine.

    Its coroutines make the actor asynchronous: all samples are awaited together.
    """

    def __init__(self, config: Config, device: torch.device, *process: Any):
        super().__init__(*process)
        self.config = config
        self.device = device
        self.engine: RolloutEngine | None = None
        self.tasks: dict[int, asyncio.Task] = {}
        self.aborted: set[int] = set()  # keys whose abortion overtook their sample

    async def start(self, reads_weights: bool = False) -> None:
        """Make the engine. It reads the model's weights itself where no learner will send any.

        This is a call of its own, so that its error arrives unchanged.
        """
        # Coroutines run on another thread, and OpenMP counts by thread
        torch.set_num_threads(self.threads)
        model = self.config.actor_rollout_ref.model
        load = None if reads_weights else lambda: load_policy(model).to(self.device)
        self.engine = make_engine(self.config, load, load_tokenizer(model), self.device)

    async def sample(self, requests: Sequence[tuple[int, SampleRequest]]) -> AsyncIterator[list]:
        """Yield lists of (key, trajectory or exception), each as soon as it holds something."""
        ended: asyncio.Queue[int] = asyncio.Queue()
        for key, request in requests:
            task = asyncio.ensure_future(self.engine.sample(request))
            task.add_done_callback(lambda _, key=key: ended.put_nowait(key))
            self.tasks[key] = task
            if key in self.aborted:
                task.cancel()
        left = len(requests)
        while left:
            keys = [await ended.get()]
            while not ended.empty():
                keys.append(ended.get_nowait())
            left -= len(keys)
            outcomes = []
            for key in keys:
                task = self.tasks.pop(key)
                error = asyncio.CancelledError() if task.cancelled() else task.exception()
                outcomes.append((key, error or task.result()))
            yield outcomes

    async def abort(self, key: int) -> None:
        """Cancel a sample. Calls may overtake one another: it may have ended, or not have begun."""
        if key in self.tasks:
            self.tasks[key].cancel()
        else:
            self.aborted.add(key)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine, once what was aborted has ended."""
        ending = [task for task in self.tasks.values() if task.cancelling()]
        await asyncio.gather(*ending, return_exceptions=True)
        self.aborted.clear()
        return getattr(self.engine, method)(*arguments)

    async def liveness(self) -> None:
        """Wait forever, without blocking the event loop."""
        await asyncio.Event().wait()


class RewardModelProcess(Process):
    """A process for the reward model, on a GPU of its own where there are any."""

    def __init__(self, cores: int | None, parts: int = 1):
        super().__init__(cores, parts)
        self.model: RewardModel | None = None

    def load(self, config: Config, device: torch.device) -> None:
        from core.rewards.reward_model import RewardModel

        self.model = RewardModel(config.reward_model, device, config.data.chat_template_date)

    def score(self, answers: Sequence[Answer]) -> Scores:
        return self.model.score(answers)
