"""Weights on their way from the learner to the engines, in buckets of bounded size.

A learner rank fills its staging memory with the bytes of a bucket. Engines on its node copy them
from there, a file in memory; engines on GPUs of their own get a broadcast of rank 0. A checksum
travels along, and receivers compute their own.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.errors import InputError

ALIGNMENT = 16  # bytes; a weight may be viewed in its own number format wherever it begins
SUMMED = 4096  # columns of a checksum
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
        """Return the bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Return the bytes up to where the next weight may begin."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Proof:
    """Checksums of one device of an engine after an update: of received buckets, and of weights."""

    received: tuple[Checksum | None, ...]
    weights: Mapping[str, Checksum]


@dataclass(frozen=True)
class Bucket:
    """Some weights and where their bytes are.

    ``files`` has a file in memory for each node (:func:`node_key`); it is None if rank 0 broadcasts
    the bytes. Within one process ``tensors`` are the weights themselves, and there is no checksum.
    """

    weights: tuple[Weight, ...]
    checksum: Checksum | None = None
    files: Mapping[str, str] | None = None
    tensors: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        return sum(weight.room for weight in self.weights)

    def open(self, device: torch.device) -> tuple[list[Tensor], Checksum | None]:
        """Return the weights' values on the device, and the checksum of the received bytes."""
        if self.checksum is None:
            return list(self.tensors), None
        data = torch.empty(self.size, dtype=torch.uint8, device=device)
        if self.files is None:
            GROUP.broadcast(data)
        else:
            file = self.files.get(node_key())
            if file is None:
                raise RuntimeError(
                    f"no learner rank left weights for {node_key()}: set hybrid_engine=False"
                )
            # Copy on write, since torch takes no memory that cannot be written. Raises ValueError
            # for a shorter file.
            mapped = np.memmap(file, np.uint8, mode="c", shape=(self.size,))
            data.copy_(torch.from_numpy(mapped))
        values = []
        begin = 0
        for weight in self.weights:
            part = data[begin : begin + weight.size]
            values.append(part.view(weight.dtype).view(weight.shape))
            begin += weight.room
        return values, checksum(data.view(torch.int32))


def node_key() -> str:
    """Return the name of what processes must share to open the same file in memory."""
    return f"node {os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def checksum(data: Tensor) -> Checksum:
    """Return the count of a tensor's numbers, and sums of their bits weighted by their places.

    Any change of one number shows, and so do numbers, rows or blocks in another order.
    """
    words = data.detach().contiguous().reshape(-1).view(BITS[data.element_size()])
    rows = len(words) // SUMMED
    table = words[: rows * SUMMED].view(rows, SUMMED)
    rest = words[rows * SUMMED :].to(torch.int64)
    totals = []
    for sums in (table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64), rest):
        places = torch.arange(1, len(sums) + 1, device=data.device)
        totals.append((sums * places).sum())
    return (len(words), *torch.stack(totals).tolist())


# -- whether weights are the model's -------------------------------------------------------------


def held_weights(named_tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Return the weights of this process in one bucket; names of one tensor are one weight."""
    names_of: dict[int, list[str]] = {}
    values: dict[int, Tensor] = {}
    for name, value in named_tensors:
        names_of.setdefault(value.data_ptr(), []).append(name)
        values[value.data_ptr()] = value  # held, so that no other gets its address
    weights = [
        Weight(tuple(names_of[at]), tuple(value.shape), value.dtype) for at, value in values.items()
    ]
    return Bucket(tuple(weights), tensors=tuple(values.values()))


def check_weights(model: nn.Module, weights: Iterable[Weight]) -> None:
    """Check that the weights are all that ``model`` has. Raises ValueError."""
    shapes: dict[str, tuple[int, ...]] = {}
    names_of: dict[int, list[str]] = {}  # names that share a tensor
    for name, tensor in model.state_dict(keep_vars=True).items():
        shapes[name] = tuple(tensor.shape)
        names_of.setdefault(id(tensor), []).append(name)
    sent = {name: weight for weight in weights for name in weight.names}
    problems = [
        f"{name}: {weight.shape}, the engine's is {shapes.get(name, 'unknown')}"
        for name, weight in sent.items()
        if weight.shape != shapes.get(name)
    ]
    for names in names_of.values():
        senders = {sent[name].names for name in names if name in sent}
        if len(senders) != 1:
            problem = "sent as several weights" if senders else "missing"
            problems.append(f"{' = '.join(names)}: {problem}")
    if problems:
        raise ValueError(
            f"update_weights: {len(problems)} weights do not fit, none was changed: "
            f"{'; '.join(problems[:8])}"
        )


# -- sending -------------------------------------------------------------------------------------


class BroadcastGroup:
    """Rank 0 of the learner and all devices of engines. A process is in one at most."""

    def join(
        self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Meet the others at a store that rank 0 has opened."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(*address, is_master=False, timeout=timeout)
        store = dist.PrefixStore("weights", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self.group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, data: Tensor) -> None:
        """Send ``data`` from rank 0, or receive it."""
        self.group.broadcast(data, root=0).wait()


GROUP = BroadcastGroup()


class Staging:
    """Memory of one bucket, ``data``, which a rank fills again and again.

    A rank that does not ``broadcast`` also has a file in memory, which goes with the process. On a
    CPU it is ``data`` itself; from a GPU :meth:`publish` copies to it.
    """

    def __init__(self, size: int, device: torch.device, *, broadcast: bool = False):
        self.files: dict[str, str] | None = None
        self.shared: Tensor | None = None
        if not broadcast:
            self.file = os.fdopen(os.memfd_create("weights"), "r+b")  # not bounded by /dev/shm
            self.file.truncate(size)
            path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
            self.shared = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self.files = {node_key(): path}
        if self.shared is not None and device.type == "cpu":
            self.data = self.shared
        else:
            self.data = torch.empty(size, dtype=torch.uint8, device=device)

    def publish(self, size: int) -> None:
        """Let the processes of the node read what was filled."""
        if self.shared is not None and self.shared is not self.data:
            self.shared[:size].copy_(self.data[:size])


@torch.no_grad()
def pack(
    weights: Sequence[Weight], values: Iterable[Tensor], limit: int, staging: Staging | None
) -> Iterator[Bucket]:
    """Yield buckets of at most ``limit`` bytes, each in the place of the one before.

    ``values`` gathers a weight whole when it is taken: all ranks of a sharded model take part, and
    those with ``staging`` keep it. Raises InputError for a weight that is larger than a bucket.
    """
    staged_size(weights, limit)
    remaining = list(reversed(weights))
    values = iter(values)
    while remaining:
        packed: list[Weight] = []
        begin = 0
        while remaining and begin + remaining[-1].room <= limit:
            weight = remaining.pop()
            value = next(values)
            end = begin + weight.room
            if staging is not None:
                value_bytes = value.contiguous().reshape(-1).view(torch.uint8)
                staging.data[begin : begin + weight.size].copy_(value_bytes)
                staging.data[begin + weight.size : end].zero_()
                del value_bytes
            del value  # before the next one is gathered
            packed.append(weight)
            begin = end
        if staging is None:
            yield Bucket(tuple(packed))
        else:
            staging.publish(begin)
            packed_bytes = staging.data[:begin].view(torch.int32)
            yield Bucket(tuple(packed), checksum(packed_bytes), staging.files)


def staged_size(weights: Sequence[Weight], limit: int) -> int:
    """Return the bytes of staging memory that the weights need.

    Raises InputError for a weight that is larger than a bucket.
    """
    largest = max(weights, key=lambda weight: weight.room)
    if largest.room > limit:
        raise InputError(
            f"{KEY}={limit // 2**20}: the weight {largest.names[0]} has "
            f"{largest.room / 2**20:.0f} MiB, and a bucket holds whole weights; set at least "
            f"{-(-largest.room // 2**20)}"
        )
    return min(limit, sum(weight.room for weight in weights))


def merged(buckets: Sequence[Bucket]) -> Bucket:
    """Return the bucket of all ranks, with the files of all nodes.

    Raises RuntimeError if ranks gathered different bytes.
    """
    staged = [bucket for bucket in buckets if bucket.checksum is not None]
    checksums = {bucket.checksum for bucket in staged}
    contents = {bucket.weights for bucket in buckets}
    if len(checksums) != 1 or len(contents) != 1:
        raise RuntimeError(
            "learner ranks gathered different weights; run again, and report it if it happens twice"
        )
    files: dict[str, str] = {}
    for bucket in staged:
        files |= bucket.files or {}
    return Bucket(staged[0].weights, staged[0].checksum, files or None)
