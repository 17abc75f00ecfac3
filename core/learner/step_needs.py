"""What a training step computes beside the policy's update, as the configuration asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.config import registry
from core.config.schema import Config
from core.types import TrainBatch


@dataclass(frozen=True)
class StepNeeds:
    """What a step needs beside the policy."""

    critic: bool
    ref: bool
    baseline: bool  # a greedy answer to every prompt
    recompute_old_log_probs: Literal["always", "if_off_policy", "never"]  # never: the engine's stand for them
    correction: bool  # of tokens that the engine sampled otherwise than the learner would
    prompts_per_mini_batch: int
    state_masking: bool  # tokens that tools wrote carry no loss

    @classmethod
    def of(cls, config: Config) -> StepNeeds:
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        correction = algorithm.rollout_correction
        estimator, loss = registry.estimator(algorithm.adv_estimator), registry.policy_loss(actor.policy_loss.loss_mode)
        reads = algorithm.use_kl_in_reward or loss.selects is not None or estimator.squares
        reads = reads or actor.ppo_epochs > 1 or correction.uses_old_log_probs
        return cls(
            critic=estimator.critic,
            ref=algorithm.use_kl_in_reward or actor.use_kl_loss,
            baseline=estimator.greedy_baseline,
            recompute_old_log_probs="never" if correction.bypass_mode else "always" if reads else "if_off_policy",
            correction=correction.uses_old_log_probs,
            prompts_per_mini_batch=actor.ppo_mini_batch_size,
            state_masking=actor.state_masking,
        )

    def old_log_probs(self, batch: TrainBatch) -> bool:
        """Return whether the step needs a pass for the old log-probs of this batch.

        With one mini-batch the ratio is one by definition: the update's own pass then gives the old log-probs.
        """
        off_policy = int(batch.group.max()) >= self.prompts_per_mini_batch  # for all mini-batches but the first
        return self.recompute_old_log_probs == "always" or (
            self.recompute_old_log_probs == "if_off_policy" and off_policy
        )
