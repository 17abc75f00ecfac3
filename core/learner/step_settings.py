"""What the configuration decides about a training step: its passes, its learning rate, how many
logits exist at once.

The learning rate's schedule counts RL steps. This module imports no torch: the plan reads it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from core.config.schema import Config
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.training_keys import OptimConfig

# Of the output head: memory and speed, and no result beyond rounding
CPU_LOGITS = 2**23  # 32 MiB in float32
# 1 GiB: 1,765 rows of a vocabulary of 152,064, where 55 rows would leave a GPU idle
GPU_LOGITS = 2**28
SHARE = 64  # of a GPU's memory, in float32, at most


def head_logits(memory: float | None) -> int:
    """Return the number of logits for a GPU of ``memory`` bytes, or for a CPU (None)."""
    return (
        CPU_LOGITS
        if memory is None
        else max(CPU_LOGITS, min(GPU_LOGITS, int(memory) // (4 * SHARE)))
    )


@dataclass(frozen=True)
class StepNeeds:
    """What a step needs beside the policy."""

    critic: bool
    ref: bool
    baseline: bool  # a greedy answer to every prompt
    # never: the engine's stand for them
    recompute_old_log_probs: Literal["always", "if_off_policy", "never"]
    prompts_per_mini_batch: int

    @classmethod
    def of(cls, config: Config) -> StepNeeds:
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        correction = algorithm.rollout_correction
        reads = algorithm.use_kl_in_reward or actor.policy_loss.entry.selects is not None
        reads = reads or actor.ppo_epochs > 1 or correction.uses_old_log_probs
        return cls(
            critic=config.has_critic,
            ref=config.needs_ref,
            baseline=algorithm.estimator.greedy_baseline,
            recompute_old_log_probs="never"
            if correction.bypass_mode
            else "always"
            if reads
            else "if_off_policy",
            prompts_per_mini_batch=actor.ppo_mini_batch_size,
        )

    def old_log_probs(self, batch: TrainBatch) -> bool:
        """Return whether the step needs a pass for the old log-probs of this batch.

        With one mini-batch the ratio is one by definition: the update's own pass then gives the old
        log-probs.
        """
        # For all mini-batches but the first
        off_policy = int(batch.group.max()) >= self.prompts_per_mini_batch
        return {"always": True, "if_off_policy": off_policy, "never": False}[
            self.recompute_old_log_probs
        ]


# --- the learning rate ---


def constant(index: int, warmup: int) -> float:
    """Rise linearly from 0 to 1 over ``warmup`` steps, then stay at 1."""
    return min(1.0, index / warmup) if warmup else 1.0


def cosine(
    index: int, warmup: int, total: int, min_lr_ratio: float = 0.0, num_cycles: float = 0.5
) -> float:
    """Warm up, then follow ``num_cycles`` waves of a cosine between 1 and ``min_lr_ratio``
    (arXiv:1608.03983, eq. 5).

    Half a wave ends at ``min_lr_ratio`` at index ``total``; beyond it the wave goes on, as
    published.
    """
    if index < warmup:
        return constant(index, warmup)
    progress = (index - warmup) / max(total - warmup, 1)
    wave = 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress))
    return max(0.0, min_lr_ratio + (1 - min_lr_ratio) * wave)


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Count the steps of warm-up in a run of ``total_steps``."""
    return (
        config.lr_warmup_steps
        if config.lr_warmup_steps >= 0
        else int(config.lr_warmup_steps_ratio * total_steps)
    )


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
