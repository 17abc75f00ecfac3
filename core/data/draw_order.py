"""Seeds by hashing, and the order in which ordinals draw examples: another one in each epoch.

Both are pure functions, so there is no loader state: a run goes on from the next ordinal.
Consecutive seeds are never handed out, because engines expand a seed ``s`` into ``s``, ``s + 1``,
..., so that neighbours would share samples.
"""

import hashlib
from functools import lru_cache

import numpy as np

SEED_BITS = 63  # non-negative in every signed 64-bit seed (torch, numpy, vLLM)


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed in ``[0, 2**63)`` for this purpose and these numbers, which may be negative."""
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

    It sorts the raw PCG64 stream, which numpy promises to keep, and not ``Generator.permutation``,
    which it may change: a run that is resumed under another numpy sees the same order.
    """
    keys = np.random.PCG64(derive_seed("order", *key)).random_raw(size)
    return np.argsort(keys, kind="stable")


class DrawOrder:
    """The example of ``length`` that each ordinal draws; ``shuffle`` permutes them in each epoch.

    An epoch's tail runs on into the next epoch, so that a batch may span two of them and no example
    is left out.
    """

    def __init__(self, length: int, seed: int, shuffle: bool = True):
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        # Two epochs: a batch may span an epoch's end, and ordinals are drawn again after it
        self._epoch = lru_cache(maxsize=2)(self._order_of_epoch)

    def index(self, ordinal: int) -> int:
        """Return the number of the example."""
        if ordinal < 0:
            raise ValueError(f"an ordinal of the training order starts at 0, got {ordinal}")
        epoch, index = divmod(ordinal, self.length)
        return int(self._epoch(epoch)[index])

    def _order_of_epoch(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            return permutation(self.length, self.seed, 0, 0, epoch)
        return np.arange(self.length)
