"""What one rank allocates and exchanges, counted at every operation on fake tensors.

A fake tensor has a shape, a type and a storage of known size, but no numbers: a learner of any size
runs on a laptop. The meter stands below autograd and DTensor and sees operations on the rank's own
tensors only. Tensors that are not fake (token ids, masks) are computed with, because shapes follow
from their values.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

GPU, HOST = "gpu", "host"
# Bytes of a collective are those of its largest tensor: the whole one of all ranks in a gather or a
# reduction, what a rank holds in an all-to-all.
COLLECTIVES = {
    "c10d._allgather_base_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "_dtensor.shard_dim_alltoall": "all-to-all",
    # Outside of FSDP2: DTensor.full_tensor
    "_c10d_functional.all_gather_into_tensor": "gather of a weight",
}
REDUCE_SCATTER, ALL_TO_ALL = "c10d._reduce_scatter_base_", "_dtensor.shard_dim_alltoall"


@dataclass
class Storage:
    """A storage that is alive: where its bytes are, and how many."""

    place: str
    bytes: int = 0


class Meter(TorchDispatchMode):
    """Counts while it is entered, inside of ``fake``. What is allocated counts at :attr:`place`.

    ``offloads``: gradients leave the GPU once they are reduced, as with FSDP2's CPUOffloadPolicy.
    """

    def __init__(self, fake: FakeTensorMode, offloads: bool = False):
        super().__init__()
        self.fake, self.offloads = fake, offloads
        self.place: str | None = GPU
        self.now: Counter[str] = Counter()  # bytes by place
        self.storages = WeakIdKeyDictionary()
        self._resize = torch.UntypedStorage.resize_
        self.reset()

    def reset(self) -> None:
        """Begin a phase: peaks start at what is there now, everything else at nothing."""
        self.peak = self.now.copy()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    @contextmanager
    def at(self, place: str | None) -> Iterator[None]:
        """Count what the block allocates at ``place``, and nothing at None."""
        before, self.place = self.place, place
        yield
        self.place = before

    def move(self, tensor: Tensor, place: str) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        entry = self.storages[local.untyped_storage()]
        size = entry.bytes
        self._change(entry, 0)
        entry.place = place
        self._change(entry, size)

    def __enter__(self) -> Meter:
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            self._see(storage)

        # FSDP2 frees gathered weights by it, which is no operation
        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _see(self, storage: torch.UntypedStorage) -> None:
        entry = self.storages.get(storage)
        if entry is None:
            entry = self.storages[storage] = Storage(self.place)
            weakref.finalize(storage, self._change, entry, 0)
        self._change(entry, storage.nbytes())

    def _change(self, entry: Storage, size: int) -> None:
        self.now[entry.place] += size - entry.bytes
        entry.bytes = size
        self.peak[entry.place] = max(self.peak[entry.place], self.now[entry.place])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor first turns it into operations on local tensors
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        if given and not any(isinstance(one, FakeTensor) or one.is_meta for one in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        # item(): any number serves, a metric or a norm
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], _numbers(args[1]))
        out = func(*args, **kwargs)
        name = str(func).rpartition(".")[0]
        if self.place is None or (isinstance(out, FakeTensor) and out.fake_mode is not self.fake):
            return out
        # Its fake implementation returns a view of a tensor that the real one never makes
        if name == ALL_TO_ALL:
            out = out.clone()
        if kind := COLLECTIVES.get(name):
            self.calls[kind] += 1
            self.sent[kind] += max(
                one.nbytes for one in tree_iter((args, out)) if isinstance(one, Tensor)
            )
        if name == REDUCE_SCATTER and self.offloads:
            self.move(args[0], HOST)
        for one in tree_iter(out):
            if isinstance(one, FakeTensor) and not one.is_meta:
                self._see(one.untyped_storage())
        return out


def _numbers(index: list[Tensor | None]) -> list[Tensor | None]:
    """Return an index without masks: how many elements a mask selects follows from its values,
    which are real."""
    found: list[Tensor | None] = []
    with unset_fake_temporarily():
        for one in index:
            found += (
                one.nonzero(as_tuple=True)
                if one is not None and one.dtype == torch.bool
                else (one,)
            )
    return found
