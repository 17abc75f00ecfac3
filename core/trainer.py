"""What every trainer has: data, models, a run, answers to questions, and validation.

:class:`Trainer` has no loop. ``core/ray_trainer.py`` adds the loop of reinforcement learning, and
``recipes/sft`` that of fine-tuning. Starting, resuming, recording, saving and stopping belong to
the :class:`core.run.Run` that a trainer holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from core.config.schema import Config
from core.data.prompts import PromptStream, load_val_prompts
from core.data.vocabulary import policy_template, with_template_date
from core.engines.engine import SamplingParams, make_engine, sampling_params
from core.engines.in_process_engine import InProcessEngine
from core.errors import UnhealthyRun, memory_phase
from core.learner.batching import mini_batching
from core.learner.models import check_lengths, load_modality, load_tokenizer
from core.learner.step_settings import StepNeeds, multiplier
from core.rewards.layer import RewardLayer
from core.rewards.reward_model import load_scoring_tokenizer
from core.rewards.scorer_check import Known, check_scorers
from core.rollout.agent_loop import (
    AgentLoop,
    Barrier,
    Limits,
    TrajectorySampler,
    check_examples,
    make_agent_loop,
)
from core.rollout.collect import make_deterministic, results_of
from core.run import LoopState, Run, prepare_torch
from core.tracking.loggers import progress
from core.tracking.metrics import BusyClock
from core.tracking.tracker import generation_rows
from core.tracking.validation import ValRecord, validation_metrics
from core.types import Prompt, ScoredGroup, StepMetrics, TrainBatch, Trajectory
from reward_scores.score import Score

if TYPE_CHECKING:
    from core.cluster.workers import Workers
    from core.data.parquet import Example


class Trainer:
    """Data, models, a run, answers and validation.

    ``Trainer(config, state).init_workers()`` checks the data, loads the models and finds the
    checkpoint to resume from. ``state`` is what the loop carries between steps, at its beginning.
    """

    def __init__(self, config: Config, state: LoopState):
        self.config = config
        self.state = state
        self.run = Run(config, state)
        self.needs = StepNeeds.of(config)
        self.val_sampling = sampling_params(config, config.actor_rollout_ref.rollout.val_kwargs)
        actor = config.actor_rollout_ref.actor
        length = config.data.max_response_length
        self.actor_mini_batches = mini_batching(actor, length, actor.policy_loss.loss_mode)
        self.critic_mini_batches = mini_batching(config.critic, length)
        self.barrier = Barrier()
        self.clock = BusyClock("decode", "reward")
        # Set by init_workers:
        self.tokenizer: Any = None
        self.modality: Any = None
        self.stream: PromptStream | None = None
        self.val_prompts: Sequence[Prompt] = ()
        self.reward: RewardLayer | None = None
        self.graded_answers: Known = {}  # data source -> an answer that was graded at start
        self.agent_loop: AgentLoop | None = None  # None if a trajectory is one turn
        self.workers: Workers | None = None
        self.sampler: TrajectorySampler | None = None
        # Set by fit, for as long as it runs:
        self.runner: asyncio.Runner | None = None

    # -- starting --------------------------------------------------------------------------------

    def init_workers(self) -> Trainer:
        """Check the data, the scorers and the checkpoint, then load the models and resume.

        Raises InputError, mostly before a model loads, and what user code raises on an example.
        """
        self.run.fetch()
        self.load_data()
        if self.config.reward_model.loads_model:
            scoring_tokenizer = load_scoring_tokenizer(self.config.reward_model.model)
            self.set_template_date(getattr(scoring_tokenizer, "chat_template", None))
        self.check_sizes()
        checkpoint = self.run.open(self.stream, critic=self.needs.critic)
        with memory_phase("load"):
            self.workers = self.make_workers(prepare_torch(self.config.trainer))
        try:
            if self.workers.reward_model is not None:
                self.reward.attach(self.workers.reward_model)
            self.state = self.run.attach(self.workers, checkpoint)
        except BaseException:
            self.workers.close()
            raise
        self.attach_engine(self.workers.engine)
        return self

    def load_data(self) -> None:
        """Load tokenizer, examples and scorers, and check that they fit. Raises InputError."""
        self.load_tokenizer()
        self.stream = self.load_stream()
        self.load_questions()
        check_examples(self.agent_loop, self.answered_examples())
        self.reward = RewardLayer(self.config)
        self.graded_answers = check_scorers(self.reward, self.answered_examples(), self.tokenizer)

    def load_tokenizer(self) -> None:
        """Load the tokenizer, and what turns examples into prompts and prompts into episodes."""
        model = self.config.actor_rollout_ref.model
        self.tokenizer = load_tokenizer(model)
        self.set_template_date(policy_template(self.config.data, self.tokenizer))
        self.modality = load_modality(model, self.tokenizer)
        self.agent_loop = make_agent_loop(self.config, self.tokenizer)

    def load_questions(self) -> None:
        """Load ``data.val_files``. Raises InputError."""
        tools_of = self.agent_loop and self.agent_loop.tools_of
        self.val_prompts = load_val_prompts(
            self.config.data, self.tokenizer, self.modality, tools_of
        )

    def check_sizes(self) -> None:
        """Check the loaded data against the model's positions and the batch. Raises InputError."""
        check_lengths(self.config, self.longest())
        self.run.count_steps(self.stream)

    def set_template_date(self, template: Any) -> None:
        """Set and record the date that a chat template writes, which stays that of the first
        start."""
        self.config = with_template_date(self.config, template, self.run.recorded_date())
        self.run.config = self.config

    def load_stream(self) -> PromptStream:
        """Return what the steps train on."""
        raise NotImplementedError

    def answered_examples(self) -> Iterable[Example | Prompt]:
        """Return the examples that the policy answers: those of validation, and what training
        adds."""
        return self.val_prompts

    def longest(self) -> dict[str, tuple[int, int]]:
        """Return, by the key of their files, the tokens of the longest prompt and of what may
        follow."""
        lengths = {"data.train_files": self.room(self.stream.files.longest)}
        if self.val_prompts:
            longest_question = max(len(prompt.token_ids) for prompt in self.val_prompts)
            lengths["data.val_files"] = self.room(longest_question)
        return lengths

    def room(self, prompt: int) -> tuple[int, int]:
        """Return the tokens of a prompt as the policy reads it, and of what may follow it."""
        return prompt, self.config.data.max_response_length

    def make_workers(self, device: torch.device) -> Workers:
        """Return the models and the engine, where ``trainer.backend`` places them."""
        # Imported here, because they import transformers and ray
        if self.config.trainer.backend == "ray":
            from core.cluster.ray_workers import RayWorkers as Backend
        else:
            from core.cluster.workers import LocalWorkers as Backend

        needs = {"needs_ref": self.needs.ref, "needs_critic": self.needs.critic}
        return Backend(self.config, self.tokenizer, device, **needs)

    def attach_engine(self, engine: Any) -> None:
        """Sample from this engine from now on."""
        if (
            self.reward is not None
            and self.reward.in_process
            and isinstance(engine, InProcessEngine)
        ):
            self.clock = BusyClock("reward", "decode")  # scoring holds up an engine of this process
        seed = self.config.trainer.seed
        self.sampler = TrajectorySampler(
            engine, self.tokenizer, seed, self.agent_loop, self.barrier
        )
        make_deterministic(self.config, engine, self.barrier)

    # -- answers ---------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def for_answering(cls, config: Config) -> Iterator[Trainer]:
        """Yield a trainer with the questions of ``data.val_files``, and nothing to train or score.

        Raises InputError for questions that do not suit the model or the agent loop.
        """
        trainer = cls(config)
        trainer.load_tokenizer()
        try:
            trainer.load_questions()
            check_examples(trainer.agent_loop, trainer.val_prompts)
            yield trainer
        finally:
            if trainer.agent_loop is not None:
                trainer.agent_loop.close()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Load an engine without a learner, for :meth:`generate` while the block runs.

        ``trainer.backend`` places it in this process or, several of them, in actors of a cluster.
        Raises InputError for a model or an engine that cannot be had, and for questions that do not
        fit into the model's positions.
        """
        longest = max(len(prompt.token_ids) for prompt in self.val_prompts)
        lengths = {"data.val_files": self.room(longest)}
        check_lengths(self.config, lengths)
        device = prepare_torch(self.config.trainer)
        with memory_phase("load"):
            if self.config.trainer.backend == "ray":
                from core.cluster.ray_pools import RayProcesses

                owner = RayProcesses(self.config, device, learners=False)
                engine = owner.engine
            else:
                owner = engine = make_engine(self.config, None, self.tokenizer, device)
        try:
            self.attach_engine(engine)
            yield
        finally:
            owner.close()

    async def generate(
        self, prompt: Prompt, sample_index: int, sampling: SamplingParams
    ) -> Trajectory:
        """Return one trajectory: an episode of the agent loop if there is one, else one turn."""
        length = self.config.data.max_response_length
        return await self.sampler.sample(
            prompt, sample_index, sampling, Limits(length, turn=length)
        )

    async def score_answers(
        self, prompt: Prompt, sample_indices: Iterable[int], sampling: SamplingParams
    ) -> ScoredGroup:
        """Return a scored answer for each sample index; each is scored while others still
        decode."""

        async def scored_answer(sample_index: int) -> tuple[Trajectory, Score]:
            with self.clock.busy("decode"):
                trajectory = await self.generate(prompt, sample_index, sampling)
            with self.clock.busy("reward"):
                scoring = self.barrier.run("scores", lambda: self.reward.score(prompt, trajectory))
                score = await scoring
            return trajectory, score.keeping_raw()

        answers = await results_of(map(scored_answer, sample_indices))
        trajectories, scores = zip(*answers, strict=True)
        return ScoredGroup(prompt, trajectories, scores)

    # -- updates ---------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        """Take the critic's optimizer steps, and the policy's from step ``trainer.critic_warmup``
        on.

        As in verl. The policy's own warm-up begins with its first step.
        """
        self.run.updating = True
        step = metrics.step
        config = self.config
        first_step = 1
        if self.needs.critic:
            first_step = max(1, config.trainer.critic_warmup)
            lr_multiplier = multiplier(config.critic.optim, step - 1, self.run.total_steps)
            with metrics.time("update_critic"):
                mini_batches = self.critic_mini_batches(batch)
                metrics.add(self.workers.update_critic(mini_batches, lr_multiplier))
        if step >= first_step:
            optim = config.actor_rollout_ref.actor.optim
            lr_multiplier = multiplier(optim, step - first_step, self.run.total_steps)
            with metrics.time("update_actor"):
                mini_batches = self.actor_mini_batches(batch)
                metrics.add(self.workers.update_actor(mini_batches, lr_multiplier))

    # -- validation ------------------------------------------------------------------------------

    def validate_before_training(self) -> None:
        """Validate the untrained policy, or with ``trainer.val_only`` whatever was loaded.

        A validation that a stop cut short is made up for: the line of its step gets the numbers.
        """
        trainer = self.config.trainer
        step = self.run.step
        first = trainer.val_only or (trainer.val_before_train and step == 0)
        if self.val_prompts and (first or self.run.lacks_validation()):
            metrics = StepMetrics(step)
            self.validate(metrics)
            record = self.run.tracker.log if first else self.run.tracker.amend
            record(metrics)

    def validate_and_complete(self, metrics: StepMetrics) -> None:
        """Validate where due, and hand the step to the run, also if the validation stops or
        fails."""
        failure = None
        due = self.run.is_due(self.config.trainer.test_freq, metrics.step, self.state)
        if self.val_prompts and due:
            try:
                self.validate(metrics)
            except UnhealthyRun:  # weights that must not be saved
                raise
            except Exception as error:
                failure = error
        self.run.complete(metrics, self.state)
        if failure is not None:
            raise failure

    async def evaluate(self) -> Sequence[ScoredGroup]:
        """Answer and score the validation prompts; no hook that shapes or filters is called.

        Raises StopRequested once the run is asked to stop.
        """
        sample_indices = range(self.config.actor_rollout_ref.rollout.val_kwargs.n)

        async def answer(prompt: Prompt) -> ScoredGroup:
            group = await self.score_answers(prompt, sample_indices, self.val_sampling)
            answered()
            return group

        with progress("validation", len(self.val_prompts), "prompt") as answered:
            answering = map(answer, self.val_prompts)
            return await results_of(answering, lambda: self.run.stop.requested)

    def validate(self, metrics: StepMetrics) -> None:
        """Answer every validation prompt ``val_kwargs.n`` times and record what was right."""
        step = metrics.step
        with metrics.time("testing"):
            groups = self.runner.run(self.evaluate())
        self.reward.failures.stop_if_none_is_graded(groups)
        metrics.add(self.reward.usage("perf/val_judge"))
        metrics.add(self.reward.failures.rate("reward/val_failed_rate"))
        self.clock.take()  # validation is one part of the step's time
        records = [ValRecord.of(group) for group in groups]
        metrics.add(validation_metrics(records))
        if self.agent_loop is not None:
            counts = self.agent_loop.metrics().items()
            of_steps = "timing_s/"
            metrics.add({f"val-{k}": v for k, v in counts if not k.startswith(of_steps)})
        self.run.tracker.log_validation(step, records)
        rows = generation_rows(step, groups, self.tokenizer)
        last = self.config.trainer.val_only or self.run.is_last(step, self.state)
        self.run.tracker.log_samples(step, rows, last)
        printed = self.config.reward_model.val_num_examine
        self.run.tracker.show(step, rows, printed, "validation_data_dir")
