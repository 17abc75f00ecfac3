"""Seeds and permutations by hashing: what is random in a run follows from its seed and from what the number is for.

Consecutive seeds are never handed out: engines expand a seed ``s`` into ``s, s + 1, ...``, so that
neighbours would share samples. Nothing here has a state that a checkpoint would have to hold.
"""

from __future__ import annotations

import hashlib

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
