"""Weights on their way from the learner to the engines, in buckets of bounded size.

A learner rank fills its staging memory with a bucket's bytes; engines on its node copy them from
there, a file in memory, and those on GPUs of their own get a broadcast of rank 0. A checksum
travels along; receivers compute their own.
"""

from __future__ import annotations

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
    def size(self) -> int:  # bytes
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes up to where the next one may begin."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Proof:
    """Checksums of what one device of an engine has after an update: the buckets as received, its
    weights by name."""

    received: tuple[Checksum | None, ...]
    weights: Mapping[str, Checksum]


@dataclass(frozen=True)
class Bucket:
    """Some weights and where their bytes are: a file in memory for each node (:func:`node_key`),
    None where rank 0 broadcasts them. ``tensors`` are the weights themselves within one process;
    then there is no checksum."""

    weights: tuple[Weight, ...]
    checksum: Checksum | None = None
    files: Mapping[str, str] | None = None
    tensors: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        return sum(weight.room for weight in self.weights)

    def open(self, device: torch.device) -> tuple[list[Tensor], Checksum | None]:
        """Return the weights' values on the device, and the checksum of what came."""
        if self.checksum is None:
            return list(self.tensors), None
        data = torch.empty(self.size, dtype=torch.uint8, device=device)
        if self.files is None:
            GROUP.broadcast(data)
        else:
            if node_key() not in self.files:
                raise RuntimeError(
                    f"no learner rank left weights for {node_key()}: set hybrid_engine=False"
                )
            # Copy on write: torch takes no memory that cannot be written. Raises ValueError for a
            # shorter file.
            data.copy_(
                torch.from_numpy(
                    np.memmap(self.files[node_key()], np.uint8, mode="c", shape=(self.size,))
                )
            )
        values, begin = [], 0
        for weight in self.weights:
            values.append(data[begin : begin + weight.size].view(weight.dtype).view(weight.shape))
            begin += weight.room
        return values, checksum(data.view(torch.int32))


def node_key() -> str:
    """Return the name of what processes must share to open the same file in memory."""
    return f"node {os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def checksum(data: Tensor) -> Checksum:
    """Return sums of the bits of a tensor's numbers, each weighted by its place: any change of one
    shows, and so do numbers, rows or blocks in another order."""
    words = data.detach().contiguous().reshape(-1).view(BITS[data.element_size()])
    rows = len(words) // SUMMED
    table, rest = words[: rows * SUMMED].view(rows, SUMMED), words[rows * SUMMED :]
    sums = (table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64), rest.to(torch.int64))
    found = [(part * torch.arange(1, len(part) + 1, device=data.device)).sum() for part in sums]
    return (len(words), *torch.stack(found).tolist())


# -- whether weights are the model's -------------------------------------------------------------


def weight_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each weight, those of ``state_dict``; names that share a weight stand
    together."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    return [tuple(names) for names in names_of.values()]


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
    shapes = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    given = {name: weight for weight in weights for name in weight.names}
    other = [name for name, weight in given.items() if weight.shape != shapes.get(name)]
    problems = [
        f"{name}: {given[name].shape}, the engine's is {shapes.get(name, 'unknown')}"
        for name in other
    ]
    for names in weight_names(model):
        senders = {given[name].names for name in names if name in given}
        if len(senders) != 1:
            problems.append(
                f"{' = '.join(names)}: {'sent as several weights' if senders else 'missing'}"
            )
    if problems:
        shown = "; ".join(problems[:8])
        raise ValueError(
            f"update_weights: {len(problems)} weights do not fit, none was changed: {shown}"
        )


# -- sending -------------------------------------------------------------------------------------


class BroadcastGroup:
    """Rank 0 of the learner and all devices of engines. A process is in one at most."""

    def join(
        self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Meet the others at a store that rank 0 has opened."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore(
            "weights", dist.TCPStore(*address, is_master=False, timeout=timeout)
        )
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
    """Memory of one bucket, ``data``, which a rank fills again and again. A rank that does not
    ``broadcast`` also has a file in memory, gone with the process: on a CPU it is ``data`` itself;
    from a GPU :meth:`publish` copies to it."""

    def __init__(self, size: int, device: torch.device, *, broadcast: bool = False):
        self.files: dict[str, str] | None = None
        self.shared: Tensor | None = None
        if not broadcast:
            self.file = os.fdopen(os.memfd_create("weights"), "r+b")  # not bounded by /dev/shm
            self.file.truncate(size)
            path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
            self.shared = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self.files = {node_key(): path}
        on_cpu = self.shared is not None and device.type == "cpu"
        self.data = self.shared if on_cpu else torch.empty(size, dtype=torch.uint8, device=device)

    def publish(self, size: int) -> None:
        """Let the processes of the node read what was filled."""
        if self.shared is not None and self.shared is not self.data:
            self.shared[:size].copy_(self.data[:size])


@torch.no_grad()
def pack(
    weights: Sequence[Weight], values: Iterable[Tensor], limit: int, staging: Staging | None
) -> Iterator[Bucket]:
    """Yield buckets of at most ``limit`` bytes, each in the place of the one before. ``values``
    gathers a weight whole when it is taken: all ranks of a sharded model take part, and those with
    ``staging`` keep it. Raises InputError."""
    staged_size(weights, limit)
    left, wholes = list(reversed(weights)), iter(values)
    while left:
        packed: list[Weight] = []
        used = 0
        while left and used + left[-1].room <= limit:
            packed.append(left.pop())
            whole, size, begin = next(wholes), packed[-1].size, used
            used += packed[-1].room
            if staging is not None:
                staging.data[begin : begin + size].copy_(
                    whole.contiguous().reshape(-1).view(torch.uint8)
                )
                staging.data[begin + size : used].zero_()
            del whole
        if staging is None:
            yield Bucket(tuple(packed))
        else:
            staging.publish(used)
            yield Bucket(
                tuple(packed), checksum(staging.data[:used].view(torch.int32)), staging.files
            )


def staged_size(weights: Sequence[Weight], limit: int) -> int:
    """Return the bytes of staging memory that the weights need. Raises InputError where one is
    larger than a bucket."""
    largest = max(weights, key=lambda weight: weight.room)
    if largest.room > limit:
        rule = (
            f"the weight {largest.names[0]} has {largest.room / 2**20:.0f} MiB, and a bucket "
            f"holds whole weights"
        )
        raise InputError(
            f"{KEY}={limit // 2**20}: {rule}; set at least {-(-largest.room // 2**20)}"
        )
    return min(limit, sum(weight.room for weight in weights))


def merged(buckets: Iterable[Bucket]) -> Bucket:
    """Return one bucket with the files of all nodes. Raises RuntimeError where ranks gathered
    different bytes."""
    buckets = list(buckets)
    staged = [bucket for bucket in buckets if bucket.checksum is not None]
    if (
        len({bucket.checksum for bucket in staged}) != 1
        or len({bucket.weights for bucket in buckets}) != 1
    ):
        raise RuntimeError(
            "learner ranks gathered different weights; run again, and report it if it happens twice"
        )
    files = {node: path for bucket in staged for node, path in (bucket.files or {}).items()}
    return Bucket(staged[0].weights, staged[0].checksum, files or None)
