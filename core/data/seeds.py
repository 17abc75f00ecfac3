"""Seeds by hashing: what is random in a run follows from its seed and from what the number is for.

Consecutive seeds are never handed out: engines expand a seed ``s`` into ``s, s + 1, ...``, so that
neighbours would share samples.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 63  # non-negative in every signed 64-bit seed (torch, numpy, vLLM)


def derive_seed(purpose: str, *numbers: int) -> int:
    """A seed in ``[0, 2**63)`` for this purpose and these numbers (of any size, negative ones too)."""
    text = ",".join([purpose, *(str(int(number)) for number in numbers)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def sampling_seed(run_seed: int, ordinal: int, sample_index: int, turn: int = 0) -> int:
    """The engine's seed for one turn of one sample of one prompt.

    A prompt that is drawn again (after a resume, or by a later policy) samples with the same seeds.
    Validation prompts have negative ordinals, so they never share a seed with a training prompt.
    """
    return derive_seed("sampling", run_seed, ordinal, sample_index, turn)
