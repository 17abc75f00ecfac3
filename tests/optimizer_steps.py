"""Updates on a whole batch, which is cut into mini-batches as the trainer cuts it."""

from __future__ import annotations

from core.cluster.workers import Workers
from core.learner.batching import mini_batching
from core.types import TrainBatch


def update_actor(
    workers: Workers, batch: TrainBatch, lr_multiplier: float = 1.0
) -> dict[str, float]:
    """Update the policy on a whole batch."""
    config = workers.config
    actor = config.actor_rollout_ref.actor
    cut = mini_batching(actor, config.data.max_response_length, actor.policy_loss.loss_mode)
    return workers.update_actor(list(cut(batch)), lr_multiplier)


def update_critic(
    workers: Workers, batch: TrainBatch, lr_multiplier: float = 1.0
) -> dict[str, float]:
    """Update the critic on a whole batch."""
    config = workers.config
    cut = mini_batching(config.critic, config.data.max_response_length)
    return workers.update_critic(list(cut(batch)), lr_multiplier)
