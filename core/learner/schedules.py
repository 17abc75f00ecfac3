"""The learning rate's schedule, which counts RL steps: all optimizer steps of an RL step share its rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.config.training_keys import OptimConfig


def constant(index: int, warmup: int) -> float:
    """Rise linearly from 0 to 1 over ``warmup`` steps, then stay at 1."""
    return min(1.0, index / max(warmup, 1)) if index < warmup else 1.0


def cosine(index: int, warmup: int, total: int, min_lr_ratio: float = 0.0, num_cycles: float = 0.5) -> float:
    """Warm up, then follow ``num_cycles`` waves of a cosine between 1 and ``min_lr_ratio`` (arXiv:1608.03983, eq. 5).

    Half a wave ends at ``min_lr_ratio`` at index ``total``; beyond it the wave goes on, as published.
    """
    if index < warmup:
        return index / max(warmup, 1)
    progress = (index - warmup) / max(total - warmup, 1)
    wave = 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress))
    return max(0.0, min_lr_ratio + (1 - min_lr_ratio) * wave)


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Count the steps of warm-up in a run of ``total_steps``."""
    return config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)


def multiplier(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the multiplier of ``optim.lr`` in RL step ``step`` of ``total_steps``, counted from 0.

    No step trains at 0. With a warm-up of w steps the first one trains at 1/w and the w-th at 1, where the published
    trainers spend their first step at 0; the decay begins at 1 after it, so that the last step is still above its end.
    """
    warmup = warmup_steps(config, total_steps)
    index = step + 1 if step < warmup else step
    if config.lr_scheduler_type == "cosine":
        return cosine(index, warmup, total_steps, config.min_lr_ratio or 0.0, config.num_cycles)
    return constant(index, warmup)
