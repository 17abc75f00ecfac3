"""How many logits of the output head exist at a time: what the learner computes with and the plan counts.

It changes memory and speed, and no result beyond rounding. This module loads no torch.
"""

from __future__ import annotations

CPU_LOGITS = 2**23  # 32 MiB in float32
GPU_LOGITS = 2**28  # 1 GiB: 1,765 rows of a vocabulary of 152,064, where 55 rows would leave a GPU idle
SHARE = 64  # of a GPU's memory, in float32, at most


def head_logits(memory: float | None) -> int:
    """Return the number of logits for a GPU of ``memory`` bytes, or for a CPU (None)."""
    if memory is None:
        return CPU_LOGITS
    return max(CPU_LOGITS, min(GPU_LOGITS, int(memory) // (4 * SHARE)))
