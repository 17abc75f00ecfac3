"""The loop: collect, log-probs, advantages, update, sync. Recipes override its hooks, never ``fit``.

The hooks take and return values: :meth:`RayPPOTrainer.generate`, :meth:`~RayPPOTrainer.shape_reward`,
:meth:`~RayPPOTrainer.keep_group` and :meth:`~RayPPOTrainer.compute_advantages`. A name's last letter is its axis: ``P``
prompts, ``N`` tokens. Starting, resuming, recording, saving and stopping belong to the :class:`core.run.Run` that the
trainer holds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from core import trace
from core.algorithm import advantages, checks
from core.algorithm.losses import KLController, kl_rewards
from core.algorithm.rollout_correction import correct, log_prob_metrics
from core.algorithm.sequences import sum_by_sequence
from core.config.schema import Config
from core.data.prompts import PromptStream, load_val_prompts, warn_of_trained_questions
from core.engines import SamplingParams, sampling_params
from core.engines.in_process_engine import InProcessEngine
from core.errors import InputError, memory_phase
from core.learner.batching import make_batch
from core.learner.models import check_lengths, load_modality, load_tokenizer
from core.learner.step_settings import StepNeeds, multiplier
from core.rewards.layer import RewardLayer
from core.rewards.scorer_check import check_hooks
from core.rollout.agent_loop import AgentLoop, Barrier, Limits, TrajectorySampler, check_examples, make_agent_loop
from core.rollout.collect import (
    Ahead,
    Collected,
    CollectLimits,
    CollectState,
    GroupRollout,
    collect,
    collect_ahead,
    make_deterministic,
)
from core.run import LoopState, Run, prepare_torch
from core.tracking.health import FAILED
from core.tracking.loggers import progress
from core.tracking.metrics import BusyClock, data_metrics, progress_metrics
from core.tracking.tracker import generation_rows
from core.tracking.validation import ValRecord, validation_metrics
from core.types import Prompt, ScoredGroup, StepMetrics, TrainBatch, Trajectory
from reward_scores.score import Score

if TYPE_CHECKING:
    from core.cluster.workers import LocalWorkers

DRAWN = 10  # collecting gives up after drawing this many times the prompts that a step needs
HOOKS = ("generate", "shape_reward", "keep_group", "compute_advantages")


class RayPPOTrainer:
    """PPO and GRPO as they are, and the base of every other recipe.

    ``RayPPOTrainer(config).init_workers()`` checks the data, loads the models and finds the checkpoint to go on from;
    ``.fit()`` trains.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a method whose name is a hook's but for a letter or two: nothing would call it."""
        super().__init_subclass__(**options)
        for name in vars(cls):
            near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.85)
            if near and not any(hasattr(base, name) for base in cls.__bases__):
                raise InputError(f"{cls.__qualname__}.{name}: nothing calls it; the hook is {near[0]}")

    def __init__(self, config: Config):
        self.config = config
        ctrl, rollout = config.algorithm.kl_ctrl, config.actor_rollout_ref.rollout
        self.kl_controller = KLController(ctrl.type, ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)
        self.collect_state = CollectState()
        self.run = Run(config, LoopState(self.kl_controller, self.collect_state))
        self.needs = StepNeeds.of(config)
        self.estimator = advantages.estimator(config.algorithm.adv_estimator)
        self.train_sampling = sampling_params(config, rollout)
        self.val_sampling = sampling_params(config, rollout.val_kwargs)
        # Set by init_workers, or by fit for as long as it runs:
        self.tokenizer: Any = None
        self.stream: PromptStream | None = None
        self.val_prompts: Sequence[Prompt] = ()
        self.reward: RewardLayer | None = None
        self.agent_loop: AgentLoop | None = None  # None where a trajectory is one turn
        self.barrier = Barrier()
        self.workers: LocalWorkers | None = None
        self.sampler: TrajectorySampler | None = None
        self.rollout: GroupRollout | None = None
        self.turns = checks.SampledTurns()
        self.clock = BusyClock("decode", "reward")
        self.runner: asyncio.Runner | None = None
        self.collected: Collected | None = None

    def init_workers(self) -> RayPPOTrainer:
        """Check the data, the scorers, the hooks and the checkpoint, then load the models and resume.

        Raises InputError, mostly before a model loads, and what a training hook raises on an example answer.
        """
        self.run.fetch()
        self.load_data()
        check_lengths(self.config, self.longest())
        checkpoint = self.run.open(self.stream, critic=self.needs.critic)
        with memory_phase("load"):
            self.workers = self.make_workers(prepare_torch(self.config.trainer))
        try:
            if self.workers.reward_model is not None:
                self.reward.attach(self.workers.reward_model)
            state = self.run.attach(self.workers, checkpoint)
        except BaseException:
            self.workers.close()
            raise
        self.collect_state, self.kl_controller = state.collect, state.kl_controller
        self.make_rollout(self.workers.engine)
        return self

    def load_data(self) -> None:
        """Load tokenizer, prompts and scorers, and check them and the hooks with each other."""
        config, data = self.config, self.config.data
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        modality = load_modality(config.actor_rollout_ref.model, self.tokenizer)
        self.agent_loop = make_agent_loop(config, self.tokenizer)
        tools_of = self.agent_loop and self.agent_loop.tools_of
        self.stream = PromptStream(data, self.tokenizer, config.trainer.seed, modality=modality, tools_of=tools_of)
        self.val_prompts = load_val_prompts(data, self.tokenizer, modality, tools_of)
        warn_of_trained_questions(self.stream.files.questions(), self.val_prompts)
        check_examples(self.agent_loop, itertools.chain(self.stream.files.examples(), self.val_prompts))
        self.reward = RewardLayer(config)
        self.reward.check(itertools.chain(self.stream.files.examples(), self.val_prompts), self.tokenizer)
        examples = list(self.stream.files.first.values())
        check_hooks(examples, self.reward.known, self.shape_reward, self.keep_group)

    def longest(self) -> dict[str, tuple[int, int]]:
        """Return, by the key of their files, the tokens of the longest prompt and those that may follow it."""
        found = {"data.train_files": self.room(self.stream.files.longest)}
        if self.val_prompts:
            found["data.val_files"] = self.room(max(len(prompt.token_ids) for prompt in self.val_prompts))
        return found

    def room(self, prompt: int) -> tuple[int, int]:
        """Return the tokens of a prompt as the policy reads it, tools included, and of what may follow it."""
        return prompt, self.config.data.max_response_length

    def make_workers(self, device: torch.device) -> LocalWorkers:
        """Return the models and the engine, where ``trainer.backend`` places them."""
        from core.cluster.workers import LocalWorkers, ray_backend  # which import transformers

        backend = ray_backend().RayWorkers if self.config.trainer.backend == "ray" else LocalWorkers
        needs = {"needs_ref": self.needs.ref, "needs_critic": self.needs.critic}
        return backend(self.config, self.tokenizer, device, **needs)

    def make_rollout(self, engine: Any) -> None:
        """Set what samples from the engine, and what answers and scores groups with the hooks."""
        if self.reward.in_process and isinstance(engine, InProcessEngine):
            self.clock = BusyClock("reward", "decode")  # scoring here holds up an engine in this process
        self.sampler = self.make_sampler(self.turns.watch(engine))
        n, greedy = self.config.actor_rollout_ref.rollout.n, self.needs.baseline
        hooks = self.generate, self.shape_reward
        self.rollout = GroupRollout(*hooks, self.reward, self.clock, n, self.train_sampling, self.barrier, greedy)
        make_deterministic(self.config, engine, self.barrier)

    def make_sampler(self, engine: Any) -> TrajectorySampler:
        """Return what samples single turns and episodes from an engine."""
        return TrajectorySampler(engine, self.tokenizer, self.config.trainer.seed, self.agent_loop, self.barrier)

    def fit(self) -> None:
        """Train to the last step. Each iteration makes one policy version."""
        owned = self.workers, self.agent_loop, self.reward
        with (
            self.run.running(*owned) as self.runner,
            closing(Ahead(self.runner, self.clock, overlaps=self.workers.overlaps)) as ahead,
        ):
            self.workers.sync_weights(self.run.step)
            self.validate_before_training()
            for metrics in self.run.steps():
                with metrics.time("step"):
                    groups_P = self.collect(metrics)
                    ahead.start(self.collect_ahead(metrics.step), metrics)  # with max_staleness: before the update
                    batch = self.make_batch(groups_P)
                    batch = self.compute_log_probs(batch, metrics)
                    batch = self.apply_rollout_correction(batch, metrics)
                    batch = self.estimate_advantages(batch, metrics)
                    self.update(batch, metrics)
                    self.collect_state = ahead.result(metrics) or self.collect_state  # None: nothing was begun
                    with metrics.time("update_weights"):  # proved by checksums and a probe, where there are two copies
                        metrics.add(self.workers.sync_weights(metrics.step))
                self.complete_step(groups_P, batch, metrics)

    # -- hooks: a recipe overrides these ---------------------------------------------------------

    async def generate(self, prompt: Prompt, sample_index: int, sampling: SamplingParams) -> Trajectory:
        """Return one trajectory. Base: an episode of the configured agent loop, or else one turn of the engine."""
        length = self.config.data.max_response_length
        return await self.sampler.sample(prompt, sample_index, sampling, Limits(length, turn=length))

    def shape_reward(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score that trains; validation never calls it. Base: the scorer's."""
        return score

    def keep_group(self, group: ScoredGroup) -> bool:
        """Return whether a step may train on the group; validation never calls it. Base: always."""
        return True

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``advantages`` and ``returns`` by ``algorithm.adv_estimator``, after a KL penalty in the reward."""
        algorithm = self.config.algorithm
        penalties_N = None
        if algorithm.use_kl_in_reward:
            penalties_N, self.kl_controller, measured = kl_rewards(batch, self.kl_controller, algorithm.kl_penalty)
            metrics.add(measured)
        inputs, shape = advantages.inputs_of(batch, algorithm, penalties_N), batch.response_mask.shape
        advantages_N, returns_N = checks.of_tokens(self.estimator, inputs, shape, torch.Tensor)
        batch = batch.adding(advantages=advantages_N, returns=returns_N)
        checks.advantages_fit(batch, penalties_N, algorithm)
        if penalties_N is not None:
            batch = batch.adding(reward=batch.reward + sum_by_sequence(penalties_N, batch.lengths))
        return batch

    # -- phases ----------------------------------------------------------------------------------

    def collect(self, metrics: StepMetrics) -> tuple[ScoredGroup, ...]:
        """Return the step's groups: the lowest ordinals that pass ``keep_group``, regardless of finishing order.

        Sets the state that the next step starts from.
        """
        looks_ahead, wanted = self.looks_ahead(metrics.step), self.config.data.train_batch_size

        async def roll_group(ordinal: int) -> ScoredGroup:
            group = await self.roll_group(ordinal)
            answered()
            self.reward.failures.stop_if_all(wanted * self.config.actor_rollout_ref.rollout.n)
            return group

        with metrics.time("gen"), progress(f"step {metrics.step}, answers", wanted, "prompt") as answered:
            collecting = collect(
                roll_group,
                self.keep_group,
                self.collect_state,
                self.collect_limits(),
                stop_requested=lambda: self.run.stop.requested,
                ahead=looks_ahead,
            )
            self.collected = self.runner.run(collecting)
        self.reward.failures.stop_if_none_is_graded(self.collected.groups)
        self.collect_state = self.collected.state
        if not looks_ahead:
            # Which groups beyond the step were answered depends on timing, and must not reach a checkpoint
            self.collect_state = dataclasses.replace(self.collect_state, carried={})
        metrics.add(self.collected.metrics)
        return self.collected.groups

    def make_batch(self, groups_P: Sequence[ScoredGroup]) -> TrainBatch:
        """Return the groups as a batch, after a check that it is what the engine sampled."""
        batch = make_batch(groups_P, self.tokenizer.pad_token_id, self.config.actor_rollout_ref.actor.state_masking)
        checks.batch_is_sampled(groups_P, batch)
        self.turns.check(groups_P)
        return batch

    def compute_log_probs(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``old_log_probs``, ``ref_log_prob`` and ``values``, each only where something reads it."""
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
        """Weigh or reject tokens whose probability differs between engine and learner, where that is asked for.

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

    def update(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        """Take the critic's optimizer steps, and the policy's from step ``trainer.critic_warmup`` on, as verl.

        The policy's own warm-up begins with its first step.
        """
        step, config = metrics.step, self.config
        first = max(1, config.trainer.critic_warmup) if self.needs.critic else 1
        if self.needs.critic:
            lr_multiplier = multiplier(config.critic.optim, step - 1, self.run.total_steps)
            with metrics.time("update_critic"):
                metrics.add(self.workers.update_critic(batch, lr_multiplier))
        if step >= first:
            optim = config.actor_rollout_ref.actor.optim
            lr_multiplier = multiplier(optim, step - first, self.run.total_steps)
            with metrics.time("update_actor"):
                metrics.add(self.workers.update_actor(batch, lr_multiplier))

    def complete_step(self, groups_P: Sequence[ScoredGroup], batch: TrainBatch, metrics: StepMetrics) -> None:
        """Measure the step, validate where due, and hand it to the run, which records and saves it."""
        trainer, step = self.config.trainer, metrics.step
        metrics.add(data_metrics(groups_P, batch))
        self.turns.forget(step - trainer.max_staleness)
        metrics.add(self.entropy_gap(batch, metrics))
        if trace.is_due(trainer.trace, step, self.run.total_steps):
            trace.dump(self.run.run_dir, step, groups_P, batch, self.tokenizer, trainer.trace.groups)
        if self.agent_loop is not None:
            metrics.add(self.agent_loop.metrics())
        metrics.add(self.reward.usage("perf/judge"))
        metrics.add(self.reward.failures.rate(FAILED))
        epoch = self.stream.epoch(groups_P[-1].prompt.ordinal)
        metrics.add(progress_metrics(metrics, epoch, self.config.learner_ranks))
        if (printed := self.config.reward_model.num_examine) or trainer.rollout_data_dir:
            rows = generation_rows(step, groups_P, self.tokenizer)
            self.run.tracker.show(step, rows, printed, "rollout_data_dir")
        state = LoopState(self.kl_controller, self.collect_state)
        if self.run.is_due(trainer.test_freq, step, state):
            self.validate(metrics)
        self.run.complete(metrics, state)

    # -- what collecting needs -------------------------------------------------------------------

    def collect_limits(self) -> CollectLimits:
        """Return how many groups a step needs and how many prompts it draws for them at most.

        A recipe that drops groups may override it.
        """
        wanted, in_flight = self.config.data.train_batch_size, self.config.data.gen_batch_size
        return CollectLimits(wanted, in_flight, DRAWN * max(wanted, in_flight), raise_on_exhausted=False)

    async def roll_group(self, ordinal: int) -> ScoredGroup:
        """Answer the prompt of an ordinal and score the answers."""
        return await self.rollout.roll_group(self.stream.prompt(ordinal))

    def looks_ahead(self, step: int) -> bool:
        """Return whether the next step's first prompts are answered by the policy that this step updates."""
        return self.config.trainer.max_staleness > 0 and step < self.run.total_steps

    def collect_ahead(self, step: int) -> Coroutine[Any, Any, CollectState] | None:
        """Return what answers the next step's first prompts with this step's policy, if ``max_staleness`` allows it."""
        if not self.looks_ahead(step):
            return None
        return collect_ahead(self.roll_group, self.keep_group, self.collected, self.collect_limits())

    # -- what is measured and shown --------------------------------------------------------------

    def entropy_gap(self, batch: TrainBatch, metrics: StepMetrics) -> Mapping[str, float]:
        """Return ``rollout_corr/entropy_gap_z``: how far entropy and -log p of the samples are apart.

        It has no meaning where the engine cuts off part of the distribution, or where answers were chosen by their
        scores (dropped groups).
        """
        sampling, roles = self.train_sampling, self.config.actor_rollout_ref
        whole = sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k < 0
        if not whole or metrics.values.get("collect/prompts_dropped") or not roles.actor.state_masking:
            return {}
        z = checks.entropy_gap_z(metrics.values, int(batch.response_mask.sum()))
        return {} if z is None else {"rollout_corr/entropy_gap_z": z}

    # -- validation ------------------------------------------------------------------------------

    def validate_before_training(self) -> None:
        """Validate the untrained policy, or with ``trainer.val_only`` whatever was loaded."""
        trainer, step = self.config.trainer, self.run.step
        if self.val_prompts and (trainer.val_only or (trainer.val_before_train and step == 0)):
            metrics = StepMetrics(step)
            self.validate(metrics)
            self.run.tracker.log(metrics)

    async def evaluate(self) -> Sequence[ScoredGroup]:
        """Answer and score the validation prompts; no hook that shapes or filters is called."""
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n

        async def answers(prompt: Prompt) -> ScoredGroup:
            group = await self.rollout.answers(prompt, range(n), self.val_sampling)
            answered()
            return group

        with progress("validation", len(self.val_prompts), "prompt") as answered:
            return await asyncio.gather(*map(answers, self.val_prompts))

    def validate(self, metrics: StepMetrics) -> None:
        """Answer every validation prompt ``val_kwargs.n`` times and record what was right."""
        step = metrics.step
        with metrics.time("testing"):
            groups = self.runner.run(self.evaluate())
        self.reward.failures.stop_if_none_is_graded(groups)
        metrics.add(self.reward.usage("perf/val_judge"))
        metrics.add(self.reward.failures.rate("reward/val_failed_rate"))
        self.clock.take()  # of validation, which is one part of the step
        records = [ValRecord.of(group) for group in groups]
        metrics.add(validation_metrics(records))
        if self.agent_loop is not None:
            found = self.agent_loop.metrics().items()
            metrics.add({f"val-{name}": value for name, value in found if not name.startswith("timing_s/")})
        self.run.tracker.log_validation(step, records)
        rows = generation_rows(step, groups, self.tokenizer)
        last = self.run.is_last(step, LoopState(self.kl_controller, self.collect_state))
        last = last or self.config.trainer.val_only
        self.run.tracker.log_samples(step, rows, last)
        self.run.tracker.show(step, rows, self.config.reward_model.val_num_examine, "validation_data_dir")
