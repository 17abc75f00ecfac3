"""Which parts of a step the configuration makes necessary: a critic, a reference, a pass for the old log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.algorithm import advantages

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.types import TrainBatch


@dataclass(frozen=True)
class StepNeeds:
    """What a step needs beside the policy."""

    critic: bool
    ref: bool
    baseline: bool  # a greedy answer to every prompt
    every_old_log_prob: bool
    no_old_log_prob: bool  # the engine's stand for them
    prompts_per_optimizer_step: int
    state_masking: bool  # tokens that tools wrote carry no loss

    @classmethod
    def of(cls, config: Config) -> StepNeeds:
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        correction = algorithm.rollout_correction
        estimator = advantages.NEEDS.get(algorithm.adv_estimator, advantages.Needs())
        return cls(
            critic=estimator.critic,
            ref=algorithm.use_kl_in_reward or actor.use_kl_loss,
            baseline=estimator.greedy_baseline,
            every_old_log_prob=algorithm.use_kl_in_reward or actor.ppo_epochs > 1 or correction.uses_old_log_probs,
            no_old_log_prob=correction.bypass_mode,
            prompts_per_optimizer_step=actor.ppo_mini_batch_size,
            state_masking=actor.state_masking,
        )

    def old_log_probs(self, batch: TrainBatch) -> bool:
        """Return whether the step needs a pass for the old log-probs: not with one optimizer step of the batch."""
        if self.no_old_log_prob:
            return False
        return self.every_old_log_prob or int(batch.group.max()) >= self.prompts_per_optimizer_step
