"""Weights on their way from the learner to the engines, in buckets of bounded size.

A learner rank fills its staging memory with a bucket's bytes; engines read them where they lie. The staging memory is

* a file in memory (CPU), which every process of the node can open,
* memory of the GPU, which an engine on the same GPU opens by CUDA IPC, or
* any memory, from which rank 0 broadcasts (NCCL between GPUs, gloo between CPUs) where engines have GPUs of their own.

Nobody holds more than its shard, a bucket and the weight that is being gathered. A checksum of the bytes travels with
each bucket; receivers compute their own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from core.algorithm.use_checks import weight_sums
from core.errors import InputError

ALIGNMENT = 16  # bytes; a weight may be viewed in its own number format wherever it begins
SUMMED = 4096  # columns of a checksum
KEY = "actor_rollout_ref.rollout.update_weights_bucket_megabytes"
Checksum = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A weight without its values. Tied weights are one, with several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes up to where the next one may begin."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Proof:
    """What one device of an engine has after an update: checksums of the buckets as received, and of its weights.

    ``sums`` are those of each weight by name, where the engine has the learner's names.
    """

    received: tuple[Checksum | None, ...]
    weights: Checksum
    sums: Mapping[str, int] = field(default_factory=dict)


class Location(Protocol):
    """Where the bytes of a bucket are, for one process that needs them."""

    def open(self, size: int, device: torch.device) -> Tensor:
        """Return the bytes, [size] uint8; they are overwritten once the engine has answered."""


@dataclass(frozen=True)
class Bucket:
    """Some weights and where their bytes are, by node or GPU (:func:`place_key`).

    ``tensors`` has the weights themselves where learner and engine are one process; then there is no checksum. ``sums``
    are checksums of each weight by each of its names.
    """

    weights: tuple[Weight, ...]
    checksum: Checksum | None = None
    places: Mapping[str, Location] | None = None
    tensors: tuple[Tensor, ...] = ()
    sums: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(weight.room for weight in self.weights)

    def open(self, device: torch.device) -> tuple[list[Tensor], Checksum | None]:
        """Return the weights' values, as views of memory that is overwritten later, and the checksum of what came."""
        if self.places is None:
            return list(self.tensors), None
        place = self.places.get(ANYWHERE) or self.places.get(place_key(device))
        if place is None:
            raise RuntimeError(
                f"no learner rank left weights for {place_key(device)}, only for {', '.join(self.places)}: with "
                "actor_rollout_ref.hybrid_engine=True every engine runs beside a learner rank; set it to False"
            )
        data = place.open(self.size, device)
        offsets = [0]
        for weight in self.weights:
            offsets.append(offsets[-1] + weight.room)
        values = [
            data[begin : begin + weight.size].view(weight.dtype).view(weight.shape)
            for weight, begin in zip(self.weights, offsets, strict=False)
        ]
        return values, checksum(data)


def checksum(data: Tensor) -> Checksum:
    """Return sums of bytes, [N] uint8 with N a multiple of 4, on the device where they are.

    Any change of one number shows, and so do numbers, rows or blocks in another order: each is weighted by its place.
    """
    return (len(data), *_sums(data).tolist())


def _sums(data: Tensor) -> Tensor:
    """Return the three sums of :func:`checksum`, [3] int64, still on the device: reading them waits for it."""
    words = data.view(torch.int32)
    rows = len(words) // SUMMED
    table, rest = words[: rows * SUMMED].view(rows, SUMMED), words[rows * SUMMED :]
    sums = (table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64), rest.to(torch.int64))
    places = (torch.arange(1, len(part) + 1, device=data.device) for part in sums)
    return torch.stack([(part * place).sum() for part, place in zip(sums, places, strict=True)])


def weights_checksum(named: Iterable[tuple[str, Tensor]]) -> Checksum:
    """Return one checksum of tensors in their order."""
    sizes, sums = [], []
    for _, value in named:
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        data = torch.nn.functional.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data
        sizes.append(len(data))
        sums.append(_sums(data))
    each = [(size, *own) for size, own in zip(sizes, torch.stack(sums).tolist() if sums else (), strict=True)]
    weighted = [[number * value for value in one] for number, one in enumerate(each, start=1)]
    return tuple(sum(column) % 2**64 for column in zip(*weighted, strict=True))


# -- places --------------------------------------------------------------------------------------

ANYWHERE = "anywhere"  # of a broadcast


def place_key(device: torch.device) -> str:
    """Return the name of what processes must share to read the same staging memory: a GPU, or a node's processes."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"node {os.uname().nodename} {namespace}".strip()


@dataclass(frozen=True)
class HostMemory:
    """A file in memory."""

    path: str

    def open(self, size: int, device: torch.device) -> Tensor:
        # Copy on write, so that no receiver can change what the next one reads. Raises ValueError for a shorter file.
        return torch.from_numpy(np.memmap(self.path, np.uint8, mode="c", shape=(size,)))


@dataclass(frozen=True)
class GPUMemory:
    """Memory of a GPU: what ``torch.multiprocessing`` sends to open it in another process."""

    arguments: tuple

    def open(self, size: int, device: torch.device) -> Tensor:
        # The owner counts how often its memory is released: it has to be opened once, however many buckets it brings.
        if OPENED.get("from") != self.arguments:
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            OPENED.clear()
            arguments = list(self.arguments)
            arguments[6] = device.index if device.index is not None else torch.cuda.current_device()  # its number here
            OPENED.update({"from": self.arguments, "data": rebuild_cuda_tensor(*arguments)})
        return OPENED["data"][:size]


OPENED: dict[str, Any] = {}  # the memory of another process that this one has open


def release() -> None:
    """Release the memory of another process, after the last bucket of an update."""
    OPENED.clear()


@dataclass(frozen=True)
class Broadcast:
    """Bytes that rank 0 of the group sends while they are opened. Every receiver has joined before."""

    def open(self, size: int, device: torch.device) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=device)
        GROUP.broadcast(data)
        return data


class BroadcastGroup:
    """Rank 0 of the learner and all devices of engines. A process is in one at most."""

    def __init__(self) -> None:
        self.group: Any = None

    def join(self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Meet the others at a store that rank 0 has opened."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore("weights", dist.TCPStore(*address, is_master=False, timeout=timeout))
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self.group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, data: Tensor) -> None:
        """Send ``data`` from rank 0, or receive it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([data], options).wait()


GROUP = BroadcastGroup()


# -- sending -------------------------------------------------------------------------------------


class Staging:
    """Memory of one bucket, which a rank fills again and again. ``place`` says how others open it."""

    def __init__(self, size: int, device: torch.device, *, broadcast: bool = False):
        self.key = ANYWHERE if broadcast else place_key(device)
        self.place: Location
        if broadcast:
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            self.place = Broadcast()
        elif device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            self.place = GPUMemory(reduce_tensor(self.data)[1])
        else:
            # Gone with the process, however it ends, and not bounded by /dev/shm.
            if hasattr(os, "memfd_create"):
                self.file: Any = os.fdopen(os.memfd_create("weights"), "r+b")
                path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
            else:
                self.file = tempfile.NamedTemporaryFile(prefix="weights-")  # noqa: SIM115 (it lives as long as this object)
                path = self.file.name
            self.file.truncate(size)
            self.data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self.place = HostMemory(path)


class Packer:
    """Gathers the weights of a sharded model into buckets of at most ``limit`` bytes.

    ``gather`` returns a weight whole and is called by all ranks in the same order; a rank without ``staging`` only
    takes part in it. ``values`` are the rank's own parts, in the order of ``weights``.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        values: Iterable[Any],
        gather: Callable[[Any, torch.dtype], Tensor],
        limit: int,
        staging: Staging | None,
    ):
        self.limit, self.gather, self.staging = limit, gather, staging
        self._left = list(reversed(weights))
        self._values = iter(values)
        self._used = 0

    @torch.no_grad()
    def next(self) -> Bucket | None:
        """Return the next bucket, or None after the last. What the former one held is overwritten.

        Raises InputError where the next weight is larger than a bucket: the update would end before its time.
        """
        packed: list[Weight] = []
        sums: dict[str, int] = {}
        used = 0
        while self._left and used + self._left[-1].room <= self.limit:
            weight = self._left.pop()
            whole = self.gather(next(self._values), weight.dtype)
            if self.staging is not None:
                data = whole.contiguous().reshape(-1).view(torch.uint8)
                self.staging.data[used : used + weight.size].copy_(data)
                self.staging.data[used + weight.size : used + weight.room].zero_()
                sums |= dict.fromkeys(weight.names, *weight_sums([("", whole)]).values())
            del whole
            packed.append(weight)
            used += weight.room
        if not packed:
            if self._left:
                raise _too_large(self._left[-1], self.limit)
            return None
        if self.staging is None:
            return Bucket(tuple(packed))
        self._used = used
        sent = checksum(self.staging.data[:used])  # waits for the copies
        return Bucket(tuple(packed), sent, {self.staging.key: self.staging.place}, sums=sums)

    def broadcast(self) -> None:
        """Send the bucket that was returned last, from rank 0, to the processes that open it."""
        GROUP.broadcast(self.staging.data[: self._used])


def staged_size(weights: Sequence[Weight], limit: int) -> int:
    """Return the bytes of staging memory that the weights need. Raises InputError where one is larger than a bucket."""
    largest = max(weights, key=lambda weight: weight.room)
    if largest.room > limit:
        raise _too_large(largest, limit)
    return min(limit, sum(weight.room for weight in weights))


def _too_large(weight: Weight, limit: int) -> InputError:
    return InputError(
        f"{KEY}={limit // 2**20}: the weight {weight.names[0]} has {weight.room / 2**20:.0f} MiB, and a bucket holds "
        f"whole weights; set at least {-(-weight.room // 2**20)}"
    )


def merged(buckets: Iterable[Bucket]) -> Bucket:
    """Return one bucket with the places of all ranks. Raises RuntimeError where ranks gathered different bytes."""
    buckets = list(buckets)
    staged = [bucket for bucket in buckets if bucket.places]
    if len({bucket.checksum for bucket in staged}) != 1 or len({bucket.weights for bucket in buckets}) != 1:
        raise RuntimeError("learner ranks gathered different weights; run again, and report it if it happens twice")
    places = {key: place for bucket in staged for key, place in bucket.places.items()}
    return Bucket(staged[0].weights, staged[0].checksum, places, sums=staged[0].sums)
