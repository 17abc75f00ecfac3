"""What every trainer has: data, models, a run, answers to questions, and validation.

:class:`Trainer` has no loop. ``core/ray_trainer.py`` adds the loop of reinforcement learning,
``recipes/sft`` that of fine-tuning. Starting, resuming, recording, saving and stopping belong to
the :class:`core.run.Run` that a trainer holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from core.checkpoint.run_state import seed_generators
from core.config.schema import Config, TrainerConfig
from core.data.prompts import PromptFiles, PromptStream, load_val_prompts
from core.data.vocabulary import policy_template, with_template_date
from core.engines.engine import SamplingParams, make_engine, sampling_params
from core.engines.in_process_engine import InProcessEngine
from core.errors import Problems, UnhealthyRun, memory_phase
from core.learner.batching import mini_batching
from core.learner.models import check_lengths, load_modality, load_tokenizer
from core.learner.step_settings import multiplier
from core.rewards.layer import RewardLayer
from core.rewards.reward_model import load_scoring_tokenizer
from core.rewards.scorer_check import Known, ScorerCheck
from core.rollout.agent_loop import (
    AgentLoop,
    EpisodeLimits,
    TrajectorySampler,
    check_example,
    make_agent_loop,
)
from core.rollout.barrier import Barrier
from core.rollout.collect import results_of
from core.run import LoopState, Run
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
        val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
        self.val_sampling = sampling_params(config, val_kwargs)
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
        self.example_problems = Problems(shown=3)  # examples that do not suit the agent loop
        self.scorer_check: ScorerCheck | None = None
        self.graded_answers: Known = {}  # data source -> an answer that was graded at start
        self.agent_loop: AgentLoop | None = None  # None if a trajectory is one turn
        self.workers: Workers | None = None
        self.sampler: TrajectorySampler | None = None
        # Set by fit while it runs:
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
        checkpoint = self.run.open(self.stream, critic=self.config.has_critic)
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
        self.reward = RewardLayer(self.config)
        agent = self.config.actor_rollout_ref.rollout.agent
        self.scorer_check = ScorerCheck(self.reward, agent_scores=agent.plays)
        self.stream = self.load_stream()
        self.load_questions()
        self.graded_answers = self.scorer_check.finish(self.tokenizer)

    def load_tokenizer(self) -> None:
        """Load the tokenizer, and what turns examples into prompts and prompts into episodes."""
        model = self.config.actor_rollout_ref.model
        self.tokenizer = load_tokenizer(model)
        self.set_template_date(policy_template(self.config.data, self.tokenizer))
        self.modality = load_modality(model, self.tokenizer)
        self.agent_loop = make_agent_loop(self.config, self.tokenizer)

    def load_questions(self) -> None:
        """Load ``data.val_files``. Raises InputError, also for what the agent loop refuses."""
        self.val_prompts = load_val_prompts(self.prompt_files())
        self.example_problems.raise_if_any()

    def check_sizes(self) -> None:
        """Check the loaded data against the model's positions and the batch. Raises InputError."""
        check_lengths(self.config, self.longest())
        self.run.count_steps(self.stream)

    def set_template_date(self, template: Any) -> None:
        """Set and record the date that a chat template writes: that of the first start."""
        self.config = with_template_date(self.config, template, self.run.recorded_date())
        self.run.config = self.config

    def load_stream(self) -> PromptStream:
        """Return what the steps train on."""
        raise NotImplementedError

    def prompt_files(self) -> PromptFiles:
        """Return what loads files of prompts, and checks each example while it loads them."""
        return PromptFiles(
            self.config.data,
            self.tokenizer,
            self.modality,
            self.agent_loop and self.agent_loop.tools_of,
            limit_key=self.config.prompt_limit_key,
            visit=self.check_example,
        )

    def check_example(self, example: Example) -> None:
        """Check an example that the policy answers: by the agent loop, and by its scorer."""
        check_example(self.agent_loop, example, self.example_problems)
        if self.scorer_check is not None:  # None in a trainer that only answers
            self.scorer_check.add(example)

    def longest(self) -> dict[str, tuple[int, int]]:
        """Return, by key of files, the tokens of the longest prompt and of what may follow."""
        longest = {}
        if self.stream is not None:
            longest["data.train_files"] = self.stream.files.longest
        if self.val_prompts:
            longest["data.val_files"] = max(len(prompt.token_ids) for prompt in self.val_prompts)
        if self.agent_loop is not None and self.agent_loop.makes_prompts:
            longest = dict.fromkeys(longest, self.config.data.max_prompt_length)
        return {key: (length, self.response_limit(length)) for key, length in longest.items()}

    def response_limit(self, prompt_length: int) -> int:
        """Return the most tokens behind a prompt of this length, tool output included."""
        return self.config.data.max_response_length

    def make_workers(self, device: torch.device) -> Workers:
        """Return the models and the engine, where ``trainer.backend`` places them."""
        # Imported here, because they import transformers and ray
        if self.config.trainer.backend == "ray":
            from core.cluster.ray_workers import RayWorkers as Backend
        else:
            from core.cluster.workers import LocalWorkers as Backend

        return Backend(
            self.config,
            self.tokenizer,
            device,
            needs_ref=self.config.needs_ref,
            needs_critic=self.config.has_critic,
        )

    def attach_engine(self, engine: Any) -> None:
        """Sample from this engine from now on."""
        seed = self.config.trainer.seed
        self.sampler = TrajectorySampler(
            engine, self.tokenizer, seed, self.agent_loop, self.barrier
        )
        if not isinstance(engine, InProcessEngine):
            return
        if self.reward is not None and self.reward.in_process:
            # Scoring in this process holds up its engine, so its seconds are counted first
            self.clock = BusyClock("reward", "decode")
        self.barrier.holds = self.held_results()
        engine.before_step = self.barrier.settled if self.barrier.holds else None

    def held_results(self) -> frozenset[str]:
        """Return what an engine in this process awaits, so that a run repeats exactly.

        Tools with ``multi_turn.deterministic_tools``, and scores if they decide which group is
        begun next.
        """
        data = self.config.data
        kinds = []
        if self.config.actor_rollout_ref.rollout.multi_turn.deterministic_tools:
            kinds.append("tools")
        # Fewer prompts in flight than a step needs: a group begins when another one is scored
        in_flight = data.gen_batch_size or data.train_batch_size
        if self.config.drops_groups or in_flight < data.train_batch_size:
            kinds.append("scores")
        return frozenset(kinds)

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
        check_lengths(self.config, self.longest())
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
        limits = EpisodeLimits(
            response=self.response_limit(len(prompt.token_ids)),
            turn=self.config.data.max_response_length,
        )
        return await self.sampler.sample(prompt, sample_index, sampling, limits)

    async def generate_and_score(
        self, prompt: Prompt, sample_indices: Iterable[int], sampling: SamplingParams
    ) -> ScoredGroup:
        """Return a scored answer for each sample index; scoring begins while others decode."""

        async def scored_answer(sample_index: int) -> tuple[Trajectory, Score]:
            with self.clock.busy("decode"):
                trajectory = await self.generate(prompt, sample_index, sampling)
            with self.clock.busy("reward"):
                score = await self.barrier.run(
                    "scores", lambda: self.reward.score(prompt, trajectory)
                )
            return trajectory, score.keeping_raw()

        answers = await results_of(map(scored_answer, sample_indices))
        trajectories, scores = zip(*answers, strict=True)
        return ScoredGroup(prompt, trajectories, scores)

    # -- updates ---------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        """Take the optimizer steps of the critic, if there is one, and of the policy.

        As in verl, the policy trains from step ``trainer.critic_warmup`` on. Its own warm-up begins
        with its first step.
        """
        self.run.updating = True
        config = self.config
        total_steps = self.run.total_steps
        first_policy_step = 1
        if config.has_critic:
            first_policy_step = max(1, config.trainer.critic_warmup)
            lr_multiplier = multiplier(config.critic.optim, metrics.step - 1, total_steps)
            with metrics.time("update_critic"):
                mini_batches = self.critic_mini_batches(batch)
                metrics.add(self.workers.update_critic(mini_batches, lr_multiplier))
        if metrics.step >= first_policy_step:
            optim = config.actor_rollout_ref.actor.optim
            lr_multiplier = multiplier(optim, metrics.step - first_policy_step, total_steps)
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
        is_first = trainer.val_only or (trainer.val_before_train and step == 0)
        if not self.val_prompts or not (is_first or self.run.lacks_validation()):
            return
        metrics = StepMetrics(step)
        self.validate(metrics)
        if is_first:
            self.run.tracker.log(metrics)
        else:
            self.run.tracker.amend(metrics)

    def validate_and_complete(self, metrics: StepMetrics) -> None:
        """Validate if due, and complete the step, also if the validation stops or fails."""
        failure = None
        is_due = self.run.is_due(self.config.trainer.test_freq, metrics.step, self.state)
        if self.val_prompts and is_due:
            try:
                self.validate(metrics)
            except UnhealthyRun:  # these weights must not be saved
                raise
            except Exception as error:
                failure = error
        self.run.complete(metrics, self.state)
        if failure is not None:
            raise failure

    async def answer_val_prompts(self) -> Sequence[ScoredGroup]:
        """Answer and score the validation prompts; no hook that shapes or filters is called.

        Raises StopRequested once the run is asked to stop.
        """
        sample_indices = range(self.config.actor_rollout_ref.rollout.val_kwargs.n)

        async def answer(prompt: Prompt) -> ScoredGroup:
            group = await self.generate_and_score(prompt, sample_indices, self.val_sampling)
            count_prompt()
            return group

        with progress("validation", len(self.val_prompts), "prompt") as count_prompt:
            answering = map(answer, self.val_prompts)
            return await results_of(answering, lambda: self.run.stop.requested)

    def validate(self, metrics: StepMetrics) -> None:
        """Answer every validation prompt ``val_kwargs.n`` times and record the scores."""
        step = metrics.step
        tracker = self.run.tracker
        with metrics.time("testing"):
            groups = self.runner.run(self.answer_val_prompts())
        self.reward.failures.stop_if_no_answer_is_graded(groups)
        metrics.add(self.reward.usage("perf/val_judge"))
        metrics.add(self.reward.failures.rate("reward/val_failed_rate"))
        self.clock.take()  # the seconds of validation are in timing_s/testing
        records = [ValRecord.of(group) for group in groups]
        metrics.add(validation_metrics(records))
        if self.agent_loop is not None:
            for name, value in self.agent_loop.metrics().items():
                if not name.startswith("timing_s/"):
                    metrics.add({f"val-{name}": value})
        tracker.log_validation(step, records)
        rows = generation_rows(step, groups, self.tokenizer)
        is_last = self.config.trainer.val_only or self.run.is_last(step, self.state)
        tracker.log_samples(step, rows, is_last)
        printed_answers = self.config.reward_model.val_num_examine
        tracker.show(step, rows, printed_answers, "validation_data_dir")


def prepare_torch(trainer: TrainerConfig) -> torch.device:
    """Set threads and seeds, and return the device. On a CPU equal ones repeat a run exactly."""
    typed = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(typed) if typed.isdecimal() and trainer.backend == "local" else os.cpu_count()
    torch.set_num_threads(trainer.cpu_threads or threads or 1)
    seed_generators(trainer.seed)
    return torch.device(trainer.device or ("cuda" if torch.cuda.is_available() else "cpu"))
