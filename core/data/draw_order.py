"""Seeds by hashing, and ordinal -> example of a data set as a pure function: epochs, shuffling, weights, curriculum.

There is no loader state. What a run needs to go on is the next ordinal. Examples are numbers here: what stands in them
is read by ``core/data/parquet.py``. Consecutive seeds are never handed out: engines expand a seed ``s`` into ``s``,
``s + 1``, ..., so that neighbours would share samples.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

SEED_BITS = 63  # non-negative in every signed 64-bit seed (torch, numpy, vLLM)


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed in ``[0, 2**63)`` for this purpose and these numbers (of any size, negative ones too)."""
    text = ",".join([purpose, *(str(int(number)) for number in numbers)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def sampling_seed(run_seed: int, ordinal: int, sample_index: int, turn: int = 0) -> int:
    """Return the engine's seed for one turn of one sample of one prompt.

    A prompt that is drawn again (after a resume, or by a later policy) samples with the same seeds.
    Validation prompts have negative ordinals, so they never share a seed with a training prompt.
    """
    return derive_seed("sampling", run_seed, ordinal, sample_index, turn)


def permutation(size: int, *key: int) -> np.ndarray:
    """Return a permutation of ``range(size)`` that depends on nothing but its arguments.

    It sorts the raw PCG64 stream, which numpy promises to keep, and not ``Generator.permutation``, which it may
    change: a run that is resumed under another numpy sees the same order.
    """
    keys = np.random.PCG64(derive_seed("order", *key)).random_raw(size)
    return np.argsort(keys, kind="stable")


class Place(NamedTuple):
    """A row: which stage, which data set of the stage, which row of the data set."""

    stage: int
    dataset: int
    row: int


@dataclass(frozen=True)
class Stage:
    """A stretch of the order: the sizes of its data sets, their weights, and how many prompts it lasts.

    ``weights=None`` draws every row once an epoch. ``prompts=None`` means one pass where the stage's length is
    asked for; the last stage of an order goes on for ever in any case.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    prompts: int | None = None

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    @property
    def length(self) -> int:
        return self.rows if self.prompts is None else self.prompts


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split ``total`` by weight into whole numbers, largest remainders first, earlier entries first on a tie."""
    share = np.asarray(weights, dtype=np.float64)
    quota = total * share / share.sum()
    counts = np.floor(quota).astype(np.int64)
    by_remainder = np.argsort(-(quota - counts), kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return tuple(int(count) for count in counts)


class Order:
    """Where each ordinal's row is.

    Without weights, the rows of a stage's data sets form one list that is permuted anew each epoch; an epoch's
    tail runs on into the next epoch, so a batch may span two of them and no row is left out.

    With weights, each block of as many prompts as the stage has rows holds each data set in exact proportion (to
    the nearest row), in shuffled places; each data set walks through its own permutations, so none of its rows
    comes again before all of them came. Unshuffled, rows keep their order and the data sets alternate evenly.

    Raises ValueError for an empty data set, or for a weight that is not positive or worth less than one row.
    """

    def __init__(self, stages: Sequence[Stage], seed: int, shuffle: bool = True):
        if not stages:
            raise ValueError("an order needs at least one stage")
        for stage in stages:
            _check(stage)
        self.stages = tuple(stages)
        self.seed = seed
        self.shuffle = shuffle
        self.length = sum(stage.length for stage in stages)
        self._starts = [0, *accumulate(stage.length for stage in stages[:-1])]
        self._edges = [list(accumulate(stage.sizes)) for stage in stages]
        self._shares = [apportion(stage.rows, stage.weights) if stage.weights else () for stage in stages]
        # Two epochs of every data set: a batch may span an epoch's end, and ordinals are drawn again behind it.
        self._walk = lru_cache(maxsize=2 * max(len(stage.sizes) for stage in stages) + 2)(self._make_walk)
        self._block = lru_cache(maxsize=2)(self._make_block)

    def place(self, ordinal: int) -> Place:
        if ordinal < 0:
            raise ValueError(f"an ordinal of the training order starts at 0, got {ordinal}")
        number = bisect_right(self._starts, ordinal) - 1
        position = ordinal - self._starts[number]
        if self.stages[number].weights:
            return self._weighted(number, position)
        epoch, index = divmod(position, self.stages[number].rows)
        row = int(self._walk(number, 0, epoch, self.stages[number].rows)[index])
        dataset = bisect_right(self._edges[number], row)
        return Place(number, dataset, row - (self._edges[number][dataset - 1] if dataset else 0))

    def _weighted(self, number: int, position: int) -> Place:
        block, index = divmod(position, self.stages[number].rows)
        datasets, ranks = self._block(number, block)
        dataset = int(datasets[index])
        size = self.stages[number].sizes[dataset]
        draw = block * self._shares[number][dataset] + int(ranks[index])
        epoch, step = divmod(draw, size)
        return Place(number, dataset, int(self._walk(number, dataset, epoch, size)[step]))

    def _make_walk(self, stage: int, dataset: int, epoch: int, size: int) -> np.ndarray:
        """Return the order of one epoch's rows."""
        return permutation(size, self.seed, stage, dataset, epoch) if self.shuffle else np.arange(size)

    def _make_block(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each place of a block, its data set and how many of that data set came before it in the block."""
        shares = self._shares[stage]
        datasets = np.repeat(np.arange(len(shares)), shares)
        if self.shuffle:
            datasets = datasets[permutation(len(datasets), self.seed, stage, -1, block)]
        else:
            even = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
            datasets = datasets[np.argsort(even, kind="stable")]
        ranks = np.empty(len(datasets), dtype=np.int64)
        for dataset, share in enumerate(shares):
            ranks[datasets == dataset] = np.arange(share)
        return datasets, ranks


def _check(stage: Stage) -> None:
    if not stage.sizes or min(stage.sizes) < 1:
        raise ValueError(f"every data set needs at least one row, got sizes {stage.sizes}")
    if stage.weights is None:
        return
    if len(stage.weights) != len(stage.sizes):
        raise ValueError(f"{len(stage.weights)} weights for {len(stage.sizes)} data sets")
    if not all(np.isfinite(weight) and weight > 0 for weight in stage.weights):
        raise ValueError(f"weights must be positive and finite, got {stage.weights}")
    if min(apportion(stage.rows, stage.weights)) < 1:
        raise ValueError(f"a weight in {stage.weights} is worth less than one of {stage.rows} rows: leave it out")
