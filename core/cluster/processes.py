"""What runs in the processes of a cluster: a rank of the learner, an engine. ``core.cluster.ray_pools`` makes Ray
actors of
them; nothing here imports ray.

``lifeline``, ``beat`` and ``stacks`` are for threads of their own: they answer while a phase is at work or hangs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from core.cluster.driver import stand_where_the_shell_stood
from core.engines import SampleRequest
from core.engines.factory import make_engine
from core.learner.models import load_policy, load_tokenizer
from core.rewards.reward_model_calls import Answer, ModelScore
from core.tracking.profiling import Profile
from core.types import Trajectory

if TYPE_CHECKING:
    from core.config.schema import Config


def _prepare(threads: int, gpus: Sequence[int | str] = ()) -> None:
    """Ray allows an actor one thread; children (an engine's own processes) go by the variable. ``gpus`` are those of
    the node that this process may use, where Ray gave them to others."""
    stand_where_the_shell_stood()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    torch.set_num_threads(threads)


def _stacks() -> str:
    """The Python stack of every other thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


Packed = tuple[str, np.ndarray, torch.dtype, torch.Size]  # name, bytes, and what they are


class LearnerProcess:
    """A process for one :class:`core.cluster.fsdp.LearnerRank`."""

    def __init__(self, threads: int):
        _prepare(threads)

    def host(self, own_address: Callable[[], str]) -> tuple[str, int]:
        """Opens the store at which the ranks meet; rank 0 only."""
        address = own_address()
        self.store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def gpus(self, own_gpus: Callable[[], list[int | str]]) -> list[int | str]:
        """What this rank computes on, for the engine beside it."""
        return own_gpus()

    def join(
        self, rank: int, world: int, address: tuple[str, int], timeout_s: float, *args: Any, **kwargs: Any
    ) -> None:
        """Joins the other ranks and makes this rank's learner."""
        from core.cluster.fsdp import LearnerRank

        if rank:
            self.store = torch.distributed.TCPStore(*address, is_master=False)
        device = kwargs["device"]
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self.store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        self.learner = LearnerRank(*args, **kwargs)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.learner, method)(*args)

    def weights(self, dtype: torch.dtype) -> Any:
        """All weights from rank 0, as shared memory can hold them; None from the others."""
        state = self.learner.weights(dtype)
        if self.learner.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine that wakes with these weights needs the room
        return None if state is None else packed(state.items())

    def start_profile(self, tool: str) -> None:
        self.profile = Profile(tool)
        self.profile.start()

    def stop_profile(self, trace: str) -> None:
        self.profile.stop(Path(trace))

    def lifeline(self) -> None:
        """Never returns: whoever waits for it learns at once that the process is gone."""
        threading.Event().wait()

    def beat(self) -> None:
        """A sign of life."""

    def stacks(self) -> str:
        return _stacks()


class EngineProcess:
    """A process for one rollout engine."""

    def __init__(self, config: Config, device: torch.device, threads: int, gpus: Sequence[int | str] = ()):
        _prepare(threads, gpus)
        self.config, self.device, self.threads = config, device, threads
        self.tasks: dict[int, asyncio.Task] = {}
        self.aborted: set[int] = set()  # before they came, perhaps

    async def start(self) -> None:
        """Makes the engine; a call of its own, so that its error arrives as it is."""
        torch.set_num_threads(
            self.threads
        )  # coroutines have another thread than the constructor, and OpenMP counts by thread
        model = self.config.actor_rollout_ref.model
        tokenizer = load_tokenizer(model)
        self.engine = make_engine(self.config, lambda: load_policy(model).to(self.device), tokenizer, self.device)

    async def sample(self, requests: Sequence[tuple[int, SampleRequest]]):
        """Yields lists of (key, trajectory or exception), each as soon as there is something in it."""
        finished: asyncio.Queue[int] = asyncio.Queue()
        for key, request in requests:
            self.tasks[key] = asyncio.ensure_future(self.engine.sample(request))
            if key in self.aborted:
                self.tasks[key].cancel()
            self.tasks[key].add_done_callback(lambda _, key=key: finished.put_nowait(key))
        left = len(requests)
        while left:
            keys = [await finished.get()]
            while not finished.empty():
                keys.append(finished.get_nowait())
            left -= len(keys)
            yield [(key, _outcome(self.tasks.pop(key))) for key in keys]

    async def abort(self, key: int) -> None:
        """Calls may overtake one another: the sample to abort may have ended, or not have begun."""
        if key in self.tasks:
            self.tasks[key].cancel()
        else:
            self.aborted.add(key)

    async def update_weights(self, weights: Sequence[Awaitable[list[Packed]]], version: int) -> None:
        await self._end_aborted()
        named = [pair for part in weights for pair in unpacked(await part)]
        self.engine.update_weights(named, version)

    async def _end_aborted(self) -> None:
        ending = [task for task in self.tasks.values() if task.cancelling()]
        await asyncio.gather(*ending, return_exceptions=True)
        self.aborted.clear()

    async def sleep(self) -> None:
        await self._end_aborted()
        self.engine.sleep()

    async def probe(self, token_ids: tuple[int, ...]) -> np.ndarray:
        return self.engine.probe(token_ids)

    async def start_profile(self, tool: str) -> None:
        self.profile = Profile(tool)
        self.profile.start()

    async def stop_profile(self, trace: str) -> None:
        self.profile.stop(Path(trace))

    async def close(self) -> None:
        self.engine.close()

    async def lifeline(self) -> None:
        await asyncio.Event().wait()

    async def beat(self) -> None: ...

    async def stacks(self) -> str:
        return _stacks()


class RewardModelProcess:
    """A process for the reward model."""

    def __init__(self, config: Config, device: torch.device, threads: int):
        from core.rewards.reward_model import RewardModel

        _prepare(threads)
        self.model = RewardModel(config.reward_model, device)

    async def ready(self) -> None: ...

    async def score(self, answers: Sequence[Answer]) -> list[ModelScore]:
        return self.model.score(answers)

    async def beat(self) -> None: ...

    async def lifeline(self) -> None:
        await asyncio.Event().wait()

    async def stacks(self) -> str:
        return _stacks()


def _outcome(task: asyncio.Task) -> Trajectory | BaseException:
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() or task.result()


def packed(named_tensors: Iterable[tuple[str, Tensor]]) -> list[Packed]:
    """Bytes, which Ray keeps in shared memory and maps into every process of the node; numpy has no bfloat16."""
    return [
        (name, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)
        for name, tensor in named_tensors
    ]


def unpacked(parts: Iterable[Packed]) -> list[tuple[str, Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return [(name, torch.from_numpy(flat).view(dtype).reshape(shape)) for name, flat, dtype, shape in parts]
