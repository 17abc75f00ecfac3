"""The loop of reinforcement learning. Recipes override its hooks, never ``fit``.

The hooks take and return values: :meth:`RayPPOTrainer.generate`,
:meth:`~RayPPOTrainer.shape_reward`, :meth:`~RayPPOTrainer.keep_group` and
:meth:`~RayPPOTrainer.compute_advantages`. A name's last letter is its axis: ``P`` prompts, ``N``
tokens. Data, models, answers and validation are those of :class:`core.trainer.Trainer`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from core import trace
from core.algorithm import advantages, checks
from core.algorithm.kl import KLController, kl_rewards
from core.algorithm.rollout_correction import correct, log_prob_metrics
from core.algorithm.sequences import sum_by_sequence
from core.config.schema import Config
from core.data.prompts import PromptStream, warn_of_trained_questions
from core.engines.engine import sampling_params
from core.learner.batching import make_batch
from core.rewards.scorer_check import check_hooks
from core.rollout.collect import (
    Ahead,
    Collected,
    CollectLimits,
    CollectState,
    collect,
    collect_ahead,
    results_of,
    without_carried,
)
from core.run import LoopState
from core.tracking.health import FAILED
from core.tracking.loggers import progress
from core.tracking.metrics import data_metrics, progress_metrics
from core.tracking.tracker import generation_rows
from core.trainer import Trainer
from core.types import Prompt, ScoredGroup, StepMetrics, TrainBatch, Trajectory
from reward_scores.score import Score

if TYPE_CHECKING:
    from core.data.parquet import Example

DRAWN = 10  # collecting gives up after drawing this many times the prompts that a step needs
GREEDY = -1  # the sample index of a greedy baseline answer


class RayPPOTrainer(Trainer):
    """PPO and GRPO as they are, and the base of every other recipe.

    ``RayPPOTrainer(config).init_workers().fit()`` trains.
    """

    def __init__(self, config: Config):
        ctrl = config.algorithm.kl_ctrl
        kl_controller = KLController(ctrl.type, ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)
        super().__init__(config, LoopState(kl_controller, CollectState()))
        self.estimator = advantages.estimator(config.algorithm.adv_estimator)
        self.train_sampling = sampling_params(config, config.actor_rollout_ref.rollout)
        self.turns = checks.SampledTurns()
        self.collected: Collected | None = None

    def load_data(self) -> None:
        """Load and check the data, the scorers and the hooks. Raises InputError."""
        super().load_data()
        warn_of_trained_questions(self.stream.files.questions(), self.val_prompts)
        first_examples = list(self.stream.files.first.values())
        check_hooks(first_examples, self.graded_answers, self.shape_reward, self.keep_group)

    def load_stream(self) -> PromptStream:
        """Return the prompts of ``data.train_files``."""
        tools_of = self.agent_loop and self.agent_loop.tools_of
        return PromptStream(
            self.config.data,
            self.tokenizer,
            self.config.trainer.seed,
            modality=self.modality,
            tools_of=tools_of,
        )

    def answered_examples(self) -> Iterable[Example | Prompt]:
        """Return the examples of training and of validation."""
        return itertools.chain(self.stream.files.examples(), self.val_prompts)

    def init_workers(self) -> RayPPOTrainer:
        """Check the data, the scorers, the hooks and the checkpoint, then load the models and
        resume.

        Raises InputError, mostly before a model loads, and what a training hook raises on an
        example.
        """
        super().init_workers()
        # Batches are checked against the turns that the engine wrote
        watched = self.turns.watch(self.workers.engine)
        self.sampler = dataclasses.replace(self.sampler, engine=watched)
        return self

    def fit(self) -> None:
        """Train to the last step. Each iteration makes one policy version."""
        owned = self.workers, self.agent_loop, self.reward
        with self.run.running(*owned) as self.runner:
            ahead = Ahead(self.runner, self.clock, overlaps=self.workers.overlaps)
            self.workers.sync_weights(self.run.step)
            self.validate_before_training()
            for metrics in self.run.steps():
                with metrics.time("step"):
                    groups_P = self.collect(metrics)
                    train = functools.partial(self.train, groups_P, metrics)
                    # With max_staleness the next step's first prompts are answered before the
                    # update
                    batch, state = ahead.train(train, self.collect_ahead(metrics.step), metrics)
                    self.take_ahead(state)
                    # Proved by checksums and a probe, where there are two copies
                    with metrics.time("update_weights"):
                        metrics.add(self.workers.sync_weights(metrics.step))
                self.complete_step(groups_P, batch, metrics)
                ahead.raise_failure()

    def train(self, groups_P: Sequence[ScoredGroup], metrics: StepMetrics) -> TrainBatch:
        """Train critic and policy on the step's groups and return their batch."""
        batch = self.make_batch(groups_P)
        batch = self.compute_log_probs(batch, metrics)
        batch = self.apply_rollout_correction(batch, metrics)
        batch = self.estimate_advantages(batch, metrics)
        self.update(batch, metrics)
        return batch

    # -- hooks: a recipe overrides these ---------------------------------------------------------

    def shape_reward(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score that trains; validation never calls it. Base: the scorer's."""
        return score

    def keep_group(self, group: ScoredGroup) -> bool:
        """Return whether a step may train on the group; validation never calls it. Base: always."""
        return True

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``advantages`` and ``returns`` by ``algorithm.adv_estimator``, after a KL penalty in
        the reward."""
        algorithm = self.config.algorithm
        penalties_N = None
        if algorithm.use_kl_in_reward:
            penalties_N, kl_controller, kl_metrics = kl_rewards(
                batch, self.state.kl_controller, algorithm.kl_penalty
            )
            self.state = dataclasses.replace(self.state, kl_controller=kl_controller)
            metrics.add(kl_metrics)
        inputs, shape = (
            advantages.inputs_of(batch, algorithm, penalties_N),
            batch.response_mask.shape,
        )
        advantages_N, returns_N = checks.of_tokens(self.estimator, inputs, shape, torch.Tensor)
        batch = batch.adding(advantages=advantages_N, returns=returns_N)
        if penalties_N is not None:
            batch = batch.adding(reward=batch.reward + sum_by_sequence(penalties_N, batch.lengths))
        return batch

    # -- phases ----------------------------------------------------------------------------------

    def collect(self, metrics: StepMetrics) -> tuple[ScoredGroup, ...]:
        """Return the step's groups: the lowest ordinals that pass ``keep_group``, regardless of
        finishing order.

        Sets the state that the next step starts from.
        """
        looks_ahead = self.looks_ahead(metrics.step)
        wanted = self.config.data.train_batch_size

        def after_group() -> None:
            answered()
            # If no answer can be scored, the run stops before the step is answered to its end
            self.reward.failures.stop_if_all(wanted * self.config.actor_rollout_ref.rollout.n)

        with (
            metrics.time("gen"),
            progress(f"step {metrics.step}, answers", wanted, "prompt") as answered,
        ):
            collecting = collect(
                self.roll_group,
                self.keep_group,
                self.state.collect,
                self.collect_limits(),
                stop_requested=lambda: self.run.stop.requested,
                after_group=after_group,
                ahead=looks_ahead,
            )
            self.collected = self.runner.run(collecting)
        self.reward.failures.stop_if_none_is_graded(self.collected.groups)
        collect_state = self.collected.state
        if not looks_ahead:
            collect_state = without_carried(collect_state)
        self.state = dataclasses.replace(self.state, collect=collect_state)
        metrics.add(self.collected.metrics)
        return self.collected.groups

    def make_batch(self, groups_P: Sequence[ScoredGroup]) -> TrainBatch:
        """Return the groups as a batch, after a check that it is what the engine sampled."""
        batch = make_batch(
            groups_P, self.tokenizer.pad_token_id, self.config.actor_rollout_ref.actor.state_masking
        )
        checks.batch_is_sampled(groups_P, batch)
        self.turns.check(groups_P)
        return batch

    def compute_log_probs(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``old_log_probs``, ``ref_log_prob`` and ``values``, each only where something reads
        it."""
        if self.needs.old_log_probs(batch):
            with metrics.time("old_log_prob"):
                log_prob, entropy = self.workers.compute_log_probs(batch)
            batch = batch.adding(old_log_probs=log_prob)
            metrics.add(log_prob_metrics(batch.adding(entropy=entropy)))
        if self.needs.ref:
            with metrics.time("ref"):
                batch = batch.adding(ref_log_prob=self.workers.compute_ref_log_prob(batch))
        if self.needs.critic:
            with metrics.time("values"):
                batch = batch.adding(values=self.workers.compute_values(batch))
        checks.finite(batch, "log_probs", "old_log_probs", "ref_log_prob", "values")
        return batch

    def apply_rollout_correction(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Weigh or reject tokens whose probability differs between engine and learner, where that
        is asked for.

        It compares with old log-probs: without them the batch stays as it is.
        """
        if not batch.has("old_log_probs"):
            return batch
        batch, corrected = correct(batch, self.config.algorithm.rollout_correction)
        metrics.add(corrected)
        return batch

    def estimate_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set advantages and returns by the hook, and check that they are finite."""
        with metrics.time("adv"):
            batch = self.compute_advantages(batch, metrics)
            checks.finite(batch, "adv", "reward", "advantages", "returns")
        return batch

    def complete_step(
        self, groups_P: Sequence[ScoredGroup], batch: TrainBatch, metrics: StepMetrics
    ) -> None:
        """Measure the step, validate where due, and hand it to the run, which records and saves
        it."""
        trainer, step = self.config.trainer, metrics.step
        metrics.add(data_metrics(groups_P, batch))
        self.turns.forget(step - trainer.max_staleness)
        metrics.add(self.entropy_gap(batch, metrics))
        if trace.is_due(trainer.trace, step, self.run.total_steps):
            trace.dump(
                self.run.run_dir, step, groups_P, batch, self.tokenizer, trainer.trace.groups
            )
        if self.agent_loop is not None:
            metrics.add(self.agent_loop.metrics())
        metrics.add(self.reward.usage("perf/judge"))
        metrics.add(self.reward.failures.rate(FAILED))
        epoch = self.stream.epoch(groups_P[-1].prompt.ordinal)
        metrics.add(progress_metrics(metrics, epoch, self.config.learner_ranks))
        if (printed := self.config.reward_model.num_examine) or trainer.rollout_data_dir:
            rows = generation_rows(step, groups_P, self.tokenizer)
            self.run.tracker.show(step, rows, printed, "rollout_data_dir")
        self.validate_and_complete(metrics)

    # -- what collecting needs -------------------------------------------------------------------

    def collect_limits(self) -> CollectLimits:
        """Return how many groups a step needs and how many prompts it draws for them at most.

        A recipe that drops groups may override it.
        """
        wanted, in_flight = self.config.data.train_batch_size, self.config.data.gen_batch_size
        return CollectLimits(
            wanted, in_flight, DRAWN * max(wanted, in_flight), raise_on_exhausted=False
        )

    async def roll_group(self, ordinal: int) -> ScoredGroup:
        """Answer the prompt of an ordinal ``rollout.n`` times, score the answers and shape the
        scores.

        If the estimator needs it, a greedy answer is scored as well: the group's baseline.
        """
        prompt = self.stream.prompt(ordinal)
        sample_indices = range(self.config.actor_rollout_ref.rollout.n)
        answering = [self.score_answers(prompt, sample_indices, self.train_sampling)]
        if self.needs.baseline:
            greedy = dataclasses.replace(self.train_sampling, temperature=0.0)
            answering.append(self.score_answers(prompt, [GREEDY], greedy))
        group, *greedy_group = await results_of(answering)
        baseline = self._shaped(greedy_group[0])[0] if greedy_group else None
        return dataclasses.replace(group, scores=self._shaped(group), baseline=baseline)

    def _shaped(self, group: ScoredGroup) -> tuple[Score, ...]:
        return tuple(map(self.shape_reward, group.scores, group.trajectories))

    def looks_ahead(self, step: int) -> bool:
        """Return whether the next step's first prompts are answered by the policy that this step
        updates."""
        return self.config.trainer.max_staleness > 0 and step < self.run.total_steps

    def collect_ahead(self, step: int) -> Coroutine[Any, Any, CollectState] | None:
        """Return what answers the next step's first prompts with this step's policy, if
        ``max_staleness`` allows it."""
        if not self.looks_ahead(step):
            return None
        return collect_ahead(
            self.roll_group, self.keep_group, self.collected, self.collect_limits()
        )

    def take_ahead(self, collect_state: CollectState | None) -> None:
        """Go on from what was collected ahead; None if nothing was."""
        collect_state = collect_state or without_carried(self.state.collect)
        self.state = dataclasses.replace(self.state, collect=collect_state)

    # -- what is measured and shown --------------------------------------------------------------

    def entropy_gap(self, batch: TrainBatch, metrics: StepMetrics) -> Mapping[str, float]:
        """Return ``rollout_corr/entropy_gap_z``: how far entropy and -log p of the samples are
        apart.

        It has no meaning where the engine cuts off part of the distribution, or where answers were
        chosen by their scores (dropped groups).
        """
        sampling, roles = self.train_sampling, self.config.actor_rollout_ref
        whole = sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k < 0
        if (
            not whole
            or metrics.values.get("collect/prompts_dropped")
            or not roles.actor.state_masking
        ):
            return {}
        z = checks.entropy_gap_z(metrics.values, int(batch.response_mask.sum()))
        return {} if z is None else {"rollout_corr/entropy_gap_z": z}
