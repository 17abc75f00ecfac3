"""The checks of a step between its phases, as the first of a run's recorders. Always on.

What they check is in :mod:`core.algorithm.invariants` and :mod:`core.algorithm.use_checks`, which phases also call
where a value is made or read. Any check that fails raises BrokenInvariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.algorithm import invariants, use_checks
from core.learner.learner import warmup_steps
from core.tracking.recorders import Moment, Recorder
from core.types import StepMetrics, TrainBatch, Trajectory

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.sections.optim import OptimConfig


class StepChecks(Recorder):
    """Checks groups and batch before the first phase, log-probs after theirs, and learning rates after the update.

    Args:
        total_steps: of the run, for the schedule of the learning rate.
        trained: ordinals below it are trained already, by the metrics of the run that is resumed.
        grade_again: gives what the scorer gives an answer, see :meth:`core.rewards.RewardLayer.grade_again`.
        check_episodes: the agent loop's check of trajectories; None where each is one turn.
        own_prompts: answers follow the prompts of the data, which no hook changes.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        total_steps: int,
        trained: int,
        grade_again: Callable[..., float | None],
        check_episodes: Callable[[Sequence[Trajectory]], None] | None,
        own_prompts: bool,
    ):
        self.config, self.tokenizer, self.total_steps = config, tokenizer, total_steps
        self.trained, self.updated = trained, False  # updated: the policy, in this process
        self.grade_again, self.check_episodes, self.own_prompts = grade_again, check_episodes, own_prompts
        self.turns = use_checks.SampledTurns()

    def begin(self, batch: TrainBatch, now: Moment) -> TrainBatch:
        """Check that the batch is what was drawn, sampled and scored, and seal it."""
        groups = now.groups
        invariants.ordinals_go_on([group.prompt.ordinal for group in groups], self.trained)
        self.trained = groups[-1].prompt.ordinal + 1
        invariants.samples_are_fresh(groups, now.metrics.step, self.config.trainer.max_staleness)
        invariants.prompts_begin_once(groups, self.tokenizer)
        invariants.text_is_the_policys(groups, self.tokenizer)
        invariants.batch_is_its_groups(groups, batch)
        self.turns.check(groups)
        use_checks.samples_are_independent(groups, greedy=not self._samples())
        use_checks.scores_are_of_their_answers(groups, self.grade_again)
        if self.check_episodes is None:
            use_checks.prompts_are_their_groups(groups, untouched=self.own_prompts)
        else:
            self.check_episodes([trajectory for group in groups for trajectory in group.trajectories])
        return use_checks.sealed(batch, *batch.stored)

    def after(self, phase: str, batch: TrainBatch, metrics: StepMetrics) -> None:
        """Check what ``log_probs`` set before advantages are made of it, and the learning rates of ``update``."""
        if phase == "log_probs":
            self._check_log_probs(batch)
        elif phase == "update":
            self._check_rates(metrics)

    def _check_log_probs(self, batch: TrainBatch) -> None:
        if self.updated and {"old_log_probs", "ref_log_prob"} <= batch.stored.keys():
            names = ("old_log_probs", "ref_log_prob", "response_mask")
            invariants.reference_stays(*map(batch.require, names))
        use_checks.unchanged(batch, "adv")
        if self.check_episodes is None:
            use_checks.groups_share_prompts(batch)

    def _check_rates(self, metrics: StepMetrics) -> None:
        actor, critic = self.config.actor_rollout_ref.actor.optim, self.config.critic.optim
        self._check_rate("critic", critic, metrics.values, metrics.step)
        self._check_rate("actor", actor, metrics.values, metrics.step)
        self.updated |= use_checks.moved_enough(metrics.values, "actor")

    def _check_rate(self, name: str, optim: OptimConfig, values: Mapping[str, float], step: int) -> None:
        """Check the learning rate that an optimizer had, where it took a step."""
        if f"{name}/lr" in values and not values.get(f"{name}/skipped_updates"):
            used, warmup = values[f"{name}/lr"], warmup_steps(optim, self.total_steps)
            invariants.rate_is_positive(used, optim.lr, step)
            use_checks.rate_is_scheduled(used, optim, warmup, step, self.total_steps)

    def record(self, batch: TrainBatch, now: Moment) -> dict[str, float]:
        """Forget the turns that no later step may train on, and measure ``rollout_corr/surprise_z``.

        The latter is how far entropy and -log p of the samples are apart, in standard errors. It has no meaning where
        the engine cuts off part of the distribution, or where answers were chosen by their scores (dropped groups).
        """
        values, actor_rollout_ref = now.metrics.values, self.config.actor_rollout_ref
        self.turns.forget(now.metrics.step - self.config.trainer.max_staleness)
        whole = self._samples() and actor_rollout_ref.rollout.top_p == 1 and actor_rollout_ref.rollout.top_k < 0
        if not whole or values.get("collect/prompts_dropped") or not actor_rollout_ref.actor.state_masking:
            return {}
        z = use_checks.surprise_z(values, int(batch.response_mask.sum()))
        return {} if z is None else {"rollout_corr/surprise_z": z}

    def _samples(self) -> bool:
        """Return whether training answers are sampled, not greedy."""
        rollout = self.config.actor_rollout_ref.rollout
        return rollout.do_sample and rollout.temperature > 0
