"""Decisions of the configuration about a step: its passes, learning rate, and logits at a time.

The schedule of the learning rate counts RL steps. This module imports no torch: the plan reads it.
"""

import math

from core.config.schema import Config
from core.config.training_keys import OptimConfig

# Logits that the output head computes at a time. They decide memory and speed, and no result beyond
# rounding.
CPU_LOGITS = 2**23  # 32 MiB in float32
# 1 GiB: 1,765 rows of a vocabulary of 152,064, where 55 rows would leave a GPU idle
GPU_LOGITS = 2**28
LARGEST_SHARE = 1 / 64  # of a GPU's memory, in float32


def head_logits(memory: float | None) -> int:
    """Return the number of logits for a GPU of ``memory`` bytes, or for a CPU (None)."""
    if memory is None:
        return CPU_LOGITS
    affordable = int(memory * LARGEST_SHARE) // 4
    return max(CPU_LOGITS, min(GPU_LOGITS, affordable))


def needs_old_log_probs(config: Config, prompts: int) -> bool:
    """Return whether a step of so many prompts needs a pass for the old log-probs.

    With one mini-batch the ratio is 1 by definition: the update's own pass then gives the old
    log-probs. All mini-batches after the first train a policy that has moved.
    """
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    if algorithm.rollout_correction.bypass_mode:
        return False  # the engine's log-probs serve as the old ones
    is_off_policy = prompts > actor.ppo_mini_batch_size or actor.ppo_epochs > 1
    return (
        is_off_policy
        or algorithm.use_kl_in_reward
        or actor.policy_loss.entry.selects is not None
        or algorithm.rollout_correction.uses_old_log_probs
    )


# -- the learning rate -----------------------------------------------------------------------------


def constant(index: int, warmup: int) -> float:
    """Rise linearly from 0 to 1 over ``warmup`` steps, then stay at 1."""
    return min(1.0, index / warmup) if warmup else 1.0


def cosine(index: int, warmup: int, total: int, min_lr_ratio: float = 0.0) -> float:
    """Warm up, then follow half a wave from 1 to ``min_lr_ratio`` (arXiv:1608.03983, eq. 5).

    It ends at index ``total``; beyond it the wave goes on, as published.
    """
    if index < warmup:
        return constant(index, warmup)
    progress = (index - warmup) / max(total - warmup, 1)
    wave = 0.5 * (1 + math.cos(math.pi * progress))
    return max(0.0, min_lr_ratio + (1 - min_lr_ratio) * wave)


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Count the steps of warm-up in a run of ``total_steps``."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps)


def multiplier(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the multiplier of ``optim.lr`` in RL step ``step`` of ``total_steps``, counted from 0.

    No step trains at 0: with a warm-up of w steps the first trains at 1/w, where published trainers
    spend it at 0.
    """
    warmup = warmup_steps(config, total_steps)
    index = step + 1 if step < warmup else step
    if config.lr_scheduler_type == "cosine":
        return cosine(index, warmup, total_steps, config.min_lr_ratio or 0.0)
    return constant(index, warmup)
