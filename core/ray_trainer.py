"""The loop of reinforcement learning. Recipes override its hooks, never ``fit``.

A recipe changes the loop by overriding four methods, the hooks:
:meth:`~core.trainer.Trainer.generate`, :meth:`RayPPOTrainer.shape_reward`,
:meth:`~RayPPOTrainer.keep_group` and :meth:`~RayPPOTrainer.compute_advantages`. Some recipes also
extend :meth:`~RayPPOTrainer.collect_limits`, :meth:`~RayPPOTrainer.make_batch` or
:meth:`~RayPPOTrainer.needs_old_log_probs`. A suffix is the axis that a value is indexed by:
``groups_P`` is a tuple with one group for each prompt, ``_B`` marks a tensor with one number for
each sequence, ``_N`` a tensor with one number for each token.
:class:`core.trainer.Trainer` provides data, models, generation, the update and validation.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch

from core import trace
from core.algorithm import advantages, checks
from core.algorithm.kl import KLController, kl_rewards
from core.algorithm.rollout_correction import correct, log_prob_metrics
from core.algorithm.sequences import sum_by_sequence
from core.config.schema import Config
from core.data.prompts import PromptStream, warn_of_trained_questions
from core.data.vocabulary import check_same_ids
from core.engines.engine import sampling_params
from core.errors import InputError
from core.learner import batching, step_settings
from core.learner.models import read_tokenizer, resolve_path
from core.rewards.scorer_check import check_hooks
from core.rollout.collect import (
    Collected,
    CollectLimits,
    CollectState,
    collect_groups,
    results_of,
)
from core.rollout.collect_ahead import answer_window, run_both
from core.run import LoopState
from core.tracking.health import FAILED_RATE
from core.tracking.loggers import progress
from core.tracking.metrics import data_metrics, progress_metrics
from core.tracking.tracker import generation_rows
from core.trainer import Trainer
from core.types import Dropped, ScoredGroup, StepMetrics, TrainBatch, Trajectory
from reward_scores.score import Score

# A step draws at most this factor times max(train_batch_size, gen_batch_size) prompts.
MAX_DRAW_FACTOR = 10
# Sample index of the greedy answer whose score is a group's baseline; sampled answers count from 0.
GREEDY_SAMPLE_INDEX = -1


class RayPPOTrainer(Trainer):
    """Train a policy with unmodified PPO or GRPO; base class of the recipes.

    ``RayPPOTrainer(config).init_workers().fit()`` trains.
    """

    def __init__(self, config: Config):
        ctrl = config.algorithm.kl_ctrl
        kl_controller = KLController(ctrl.type, ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)
        super().__init__(config, LoopState(kl_controller, CollectState()))
        self.estimator = advantages.estimator(config.algorithm.adv_estimator)
        self.train_sampling = sampling_params(config, config.actor_rollout_ref.rollout)
        # What the last collect() returned. collect_ahead() answers the ordinals of its
        # ahead_window: prompts of later steps.
        self.collected: Collected | None = None
        # Exception raised while collecting during the last update; the next collect() re-raises it.
        self.ahead_failure: Exception | None = None

    # -- starting --------------------------------------------------------------------------------

    def load_data(self) -> None:
        """Load and check the data, the scorers and the hooks. Raises InputError."""
        super().load_data()
        self.check_critic()
        warn_of_trained_questions(self.stream.files.questions(), self.val_prompts)
        first_examples = list(self.stream.files.first.values())
        check_hooks(first_examples, self.graded_answers, self.shape_reward, self.keep_group)

    def check_critic(self) -> None:
        """Raise InputError for a critic to which the policy's token ids mean other tokens."""
        model = self.config.critic.model
        if self.config.critic.enable and model.path != self.config.actor_rollout_ref.model.path:
            key = "critic.model.path"
            path = resolve_path(model.path, key, weights=False)
            try:
                tokenizer = read_tokenizer(path, key, trust_remote_code=model.trust_remote_code)
            except InputError:  # it has none of its own
                return
            check_same_ids(self.tokenizer, tokenizer, f"{key}={model.path}")

    def load_stream(self) -> PromptStream:
        """Return the prompts of ``data.train_files``."""
        return PromptStream(self.config.data, self.prompt_files(), self.config.trainer.seed)

    # -- the loop --------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step. Each iteration makes one policy version."""
        # self.runner runs all coroutines on one event loop. The workers, the agent loop and the
        # reward layer are closed when the block ends.
        with self.run.around_loop(self.workers, self.agent_loop, self.reward) as self.runner:
            self.workers.sync_weights(self.run.step)
            self.validate_before_training()
            # An empty StepMetrics for each step, with that step's number in metrics.step. It ends
            # when complete_step() has completed the last step.
            for metrics in self.run.metrics_of_steps():
                with metrics.time("step"):
                    groups_P = self.collect(metrics)
                    if self.collects_while_learning(metrics.step):
                        batch = self.learn_while_collecting(groups_P, metrics)
                    else:
                        batch = self.learn(groups_P, metrics)
                    self.sync_weights(metrics)
                self.complete_step(groups_P, batch, metrics)

    def learn(self, groups_P: Sequence[ScoredGroup], metrics: StepMetrics) -> TrainBatch:
        """Update critic and policy from the step's groups. Return the batch they trained on."""
        batch = self.make_batch(groups_P)
        batch = self.compute_log_probs(batch, metrics)
        batch = self.apply_rollout_correction(batch, metrics)
        batch = self.estimate_advantages(batch, metrics)
        self.update(batch, metrics)
        return batch

    # -- hooks: a recipe overrides these ---------------------------------------------------------

    def shape_reward(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score used for training. Not called in validation.

        By default, the score unchanged.
        """
        return score

    def keep_group(self, group: ScoredGroup) -> bool:
        """Return whether a step may train on the group. Not called in validation.

        By default, every group is kept.
        """
        return True

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``advantages`` and ``returns`` by ``algorithm.adv_estimator``.

        With ``algorithm.use_kl_in_reward`` the estimator sees each token's reward with
        ``-coefficient * KL`` added. Afterwards the same terms are added to ``batch.reward``.
        """
        algorithm = self.config.algorithm
        kl_rewards_N = None  # -coefficient * KL of each token
        if algorithm.use_kl_in_reward:
            kl_rewards_N, kl_controller, kl_metrics = kl_rewards(
                batch, self.state.kl_controller, algorithm.kl_penalty
            )
            self.state = dataclasses.replace(self.state, kl_controller=kl_controller)
            metrics.add(kl_metrics)
        inputs = advantages.inputs_of(batch, algorithm, kl_rewards_N)
        token_shape = batch.response_mask.shape
        advantages_N, returns_N = checks.call_and_check(
            self.estimator, inputs, token_shape, second_type=torch.Tensor
        )
        batch = batch.adding(advantages=advantages_N, returns=returns_N)
        # Only now, or the estimator would count the KL twice
        if kl_rewards_N is not None:
            kl_rewards_B = sum_by_sequence(kl_rewards_N, batch.lengths)
            batch = batch.adding(reward=batch.reward + kl_rewards_B)
        return batch

    # -- collecting ------------------------------------------------------------------------------

    def collect(self, metrics: StepMetrics) -> tuple[ScoredGroup, ...]:
        """Return the step's groups.

        They are the first ``train_batch_size`` groups, in prompt-stream order, that ``keep_group``
        accepts. Set the state that the next step starts from. With ``trainer.max_staleness`` the
        prompts of a later step are answered here too, unless they can be answered during the
        update.
        """
        if self.ahead_failure is not None:
            raise self.ahead_failure
        groups_needed = self.config.data.train_batch_size
        with (
            metrics.time("gen"),
            progress(f"step {metrics.step}, answers", groups_needed, "prompt") as count_group,
        ):

            def after_group(group: ScoredGroup | Dropped) -> None:
                if isinstance(group, ScoredGroup):
                    count_group()
                # If scoring always fails and keep_group drops ungraded groups, the step would
                # draw to its limit. So stop after as many failures as a step has answers.
                answers_per_step = groups_needed * self.config.actor_rollout_ref.rollout.n
                self.reward.failures.stop_if_every_answer_failed(answers_per_step)

            collecting = collect_groups(
                self.generate_group,
                self.keep_group,
                self.state.collect_state,
                self.collect_limits(),
                stop_requested=lambda: self.run.stop.requested,
                after_group=after_group,
                steps_ahead=self.steps_ahead(metrics.step),
                # Step s samples with version s - 1 and makes version s. The next step accepts
                # groups that are at most max_staleness versions older than its own.
                oldest_version=metrics.step - self.config.trainer.max_staleness,
            )
            self.collected = self.runner.run(collecting)
        self.reward.failures.stop_if_no_answer_is_graded(self.collected.groups)
        metrics.add(self.collected.metrics)
        # Which groups are carried must not depend on timing. So of those beyond the step's last one
        # the state keeps what was carried into this step, and none that this step began.
        # self.collected still has them all: collect_ahead() uses those in its window and answers
        # what is missing there, so its result does not depend on timing either.
        carried_before = self.state.collect_state.carried
        next_state = self.collected.state
        carried = {
            ordinal: group
            for ordinal, group in next_state.carried.items()
            if ordinal in carried_before
        }
        self.set_collect_state(dataclasses.replace(next_state, carried=carried))
        if self.steps_ahead(metrics.step) > 0 and not self.workers.generates_while_learning:
            with metrics.time("gen_ahead"):
                state_with_answers = self.runner.run(self.collect_ahead())
            self.set_collect_state(state_with_answers)
        # Seconds of decoding and of scoring in this step; take() sets the clock to 0
        busy_seconds = self.clock.take()
        metrics.add({f"timing_s/{activity}": s for activity, s in busy_seconds.items()})
        return self.collected.groups

    def set_collect_state(self, collect_state: CollectState) -> None:
        """Set what the next step's collecting starts from."""
        self.state = dataclasses.replace(self.state, collect_state=collect_state)

    def collect_limits(self) -> CollectLimits:
        """Return how many groups a step needs and how many prompts it may draw for them.

        A recipe that drops groups may override it.
        """
        wanted = self.config.data.train_batch_size
        max_in_flight = self.config.data.gen_batch_size  # here: prompts answered at the same time
        return CollectLimits(
            wanted=wanted,
            max_in_flight=max_in_flight,
            max_drawn=MAX_DRAW_FACTOR * max(wanted, max_in_flight),
            raise_on_exhausted=False,
        )

    async def generate_group(self, ordinal: int) -> ScoredGroup:
        """Answer a prompt ``rollout.n`` times; score and shape the answers.

        ``ordinal`` is the prompt's position in the prompt stream.
        If the estimator needs a baseline, a greedy answer is generated too; its score is the
        group's baseline.
        """
        prompt = self.stream.prompt(ordinal)
        sample_indices = range(self.config.actor_rollout_ref.rollout.n)
        answering = self.generate_and_score(prompt, sample_indices, self.train_sampling)
        if not self.config.algorithm.estimator.greedy_baseline:
            group = await answering
            return dataclasses.replace(group, scores=self.shaped_scores(group))
        greedy_sampling = dataclasses.replace(self.train_sampling, temperature=0.0)
        answering_greedily = self.generate_and_score(prompt, [GREEDY_SAMPLE_INDEX], greedy_sampling)
        group, greedy_group = await results_of([answering, answering_greedily])
        (baseline,) = self.shaped_scores(greedy_group)
        return dataclasses.replace(group, scores=self.shaped_scores(group), baseline=baseline)

    def shaped_scores(self, group: ScoredGroup) -> tuple[Score, ...]:
        """Return the group's scores as ``shape_reward`` changes them."""
        return tuple(map(self.shape_reward, group.scores, group.trajectories))

    # -- collecting for the next steps -----------------------------------------------------------

    def steps_ahead(self, step: int) -> int:
        """Return how many steps ahead this step answers prompts; 0 if no step follows."""
        if self.run.is_last(step, self.state):
            return 0
        return min(self.config.trainer.max_staleness, self.run.total_steps - step)

    def collects_while_learning(self, step: int) -> bool:
        """Return whether prompts of later steps are answered during this step's update."""
        return self.steps_ahead(step) > 0 and self.workers.generates_while_learning

    async def collect_ahead(self) -> CollectState:
        """Answer the prompts of later steps that have no answer yet, with the current policy."""
        return await answer_window(
            self.generate_group, self.keep_group, self.collected, self.collect_limits()
        )

    def learn_while_collecting(
        self, groups_P: Sequence[ScoredGroup], metrics: StepMetrics
    ) -> TrainBatch:
        """Learn from the step's groups while prompts of later steps are answered.

        If answering fails, the step is still completed. The next one then raises the failure.
        """
        learn = functools.partial(self.learn, groups_P, metrics)
        batch, state_or_exception = self.runner.run(run_both(learn, self.collect_ahead(), metrics))
        if isinstance(state_or_exception, CollectState):
            self.set_collect_state(state_or_exception)
        else:
            self.ahead_failure = state_or_exception
        # The clock has the seconds of answering since collect() set it to 0. wait_ahead are those
        # after the update had ended; the update hid the others.
        answering_seconds = sum(self.clock.take().values())
        hidden_seconds = answering_seconds - metrics.values["timing_s/wait_ahead"]
        metrics.add({"timing_s/hidden_ahead": max(0.0, hidden_seconds)})
        return batch

    # -- learning --------------------------------------------------------------------------------

    def make_batch(self, groups_P: Sequence[ScoredGroup]) -> TrainBatch:
        """Return the groups as one batch."""
        return batching.make_batch(groups_P, self.tokenizer.pad_token_id)

    def compute_log_probs(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``old_log_probs``, ``ref_log_prob`` and ``values``, each only if it is read."""
        if self.needs_old_log_probs(batch):
            with metrics.time("old_log_prob"):
                log_prob, entropy = self.workers.compute_log_probs(batch)
            batch = batch.adding(old_log_probs=log_prob)
            # Only the metrics read the entropy, so the step's batch does not keep it.
            batch_with_entropy = batch.adding(entropy=entropy)
            metrics.add(log_prob_metrics(batch_with_entropy))
        if self.config.needs_ref:
            with metrics.time("ref"):
                batch = batch.adding(ref_log_prob=self.workers.compute_ref_log_prob(batch))
        if self.config.has_critic:
            with metrics.time("values"):
                batch = batch.adding(values=self.workers.compute_values(batch))
        checks.finite(batch, "old_log_probs", "ref_log_prob", "values", phase="log_probs")
        return batch

    def needs_old_log_probs(self, batch: TrainBatch) -> bool:
        """Return whether the step needs a pass for the old log-probs of this batch."""
        # The number of prompts decides how many mini-batches there are. If there is one, the
        # update's own pass can give the old log-probs.
        num_prompts = int(batch.group.max()) + 1
        return step_settings.needs_old_log_probs(self.config, num_prompts)

    def apply_rollout_correction(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Weight or reject tokens whose probability differs between engine and learner.

        ``algorithm.rollout_correction`` decides how. The learner's probabilities are those of
        ``old_log_probs``. If the batch has none, it is returned unchanged.
        """
        if not batch.has("old_log_probs"):
            return batch
        batch, correction_metrics = correct(batch, self.config.algorithm.rollout_correction)
        metrics.add(correction_metrics)
        return batch

    def estimate_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set advantages and returns by the hook, and check that they are finite."""
        with metrics.time("adv"):
            batch = self.compute_advantages(batch, metrics)
            checks.finite(batch, "reward", "advantages", "returns", phase="adv")
        return batch

    def sync_weights(self, metrics: StepMetrics) -> None:
        """Copy the new weights to the engines.

        Checksums and a probe text verify the copy. An engine that shares the learner's weights in
        one process needs no copy.
        """
        with metrics.time("update_weights"):
            metrics.add(self.workers.sync_weights(metrics.step))

    # -- after the update ------------------------------------------------------------------------

    def complete_step(
        self, groups_P: Sequence[ScoredGroup], batch: TrainBatch, metrics: StepMetrics
    ) -> None:
        """Measure the step, validate it if due, and have the run record and save it."""
        settings = self.config.trainer
        step = metrics.step
        metrics.add(data_metrics(groups_P, batch))
        # Reads rollout_corr/* and collect/prompts_dropped, which the step has added before
        metrics.add(self.entropy_gap_z(batch, metrics))
        if trace.is_due(settings.trace, step, self.run.total_steps):
            count = settings.trace.groups
            trace.dump(self.run.run_dir, step, groups_P, batch, self.tokenizer, count)
        if self.agent_loop is not None:
            metrics.add(self.agent_loop.metrics())
        metrics.add(self.reward.usage("perf/judge"))
        metrics.add(self.reward.failures.rate(FAILED_RATE))
        epoch = self.stream.epoch(groups_P[-1].prompt.ordinal)
        metrics.add(progress_metrics(metrics, epoch, self.config.learner_ranks))
        printed_answers = self.config.reward_model.num_examine
        if printed_answers or settings.rollout_data_dir:
            # Print num_examine answers of each data source; write all to rollout_data_dir, if set.
            rows = generation_rows(step, groups_P, self.tokenizer)
            self.run.tracker.show(step, rows, printed_answers, key="rollout_data_dir")
        self.validate_and_complete(metrics)

    def entropy_gap_z(self, batch: TrainBatch, metrics: StepMetrics) -> Mapping[str, float]:
        """Return ``rollout_corr/entropy_gap_z``: the gap of entropy and -log p of the samples.

        It is by how many standard errors the gap exceeds a tolerance; 0 within it. It is omitted
        where the two need not agree: after greedy sampling; after truncation without ``kept_sets``
        (log-probs are then over all tokens); if groups were dropped (scores chose the answers); if
        the policy did not sample all trained tokens.
        """
        sampling = self.train_sampling
        if sampling.temperature == 0 or (sampling.truncates and not sampling.kept_sets):
            return {}
        if metrics.values.get("collect/prompts_dropped") or batch.has("sampled_mask"):
            return {}
        z = checks.entropy_gap_z(metrics.values, int(batch.response_mask.sum()))
        return {} if z is None else {"rollout_corr/entropy_gap_z": z}
