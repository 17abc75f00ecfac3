"""The loop of supervised fine-tuning: draw demonstrations, raise their likelihood, validate by answering questions.

The run, workers, learner and validation are core's. The loop is another one than that of reinforcement learning, so
``fit`` is written anew here, where a recipe would override hooks: nothing is collected, and engines get the weights
only where a validation needs them.
"""

from __future__ import annotations

from core.algorithm.sequences import count_by_sequence
from core.data.prompts import PromptStream, load_val_prompts, warn_of_trained_questions
from core.learner.models import load_tokenizer
from core.ray_trainer import RayPPOTrainer
from core.rewards.layer import RewardLayer
from core.rollout.agent_loop import check_examples, make_agent_loop
from core.rollout.collect import CollectState, StopRequested
from core.run import LoopState
from core.tracking.metrics import progress_metrics
from core.types import StepMetrics, TrainBatch
from recipes.sft.demonstrations import DemonstrationFiles, demonstration_batch, end_ids


class SFTTrainer(RayPPOTrainer):
    """Fine-tunes on ``data.train_files``; ``data.val_files`` are questions, as in every other recipe."""

    def load_data(self) -> None:
        """Load tokenizer, demonstrations, questions and scorers, and check them. Raises InputError."""
        model, data = self.config.actor_rollout_ref.model, self.config.data
        self.tokenizer = load_tokenizer(model)
        files = DemonstrationFiles(data, self.tokenizer, end_ids(self.tokenizer, model))
        self.stream = PromptStream(data, self.tokenizer, self.config.trainer.seed, files)
        self.agent_loop = make_agent_loop(self.config, self.tokenizer)
        self.val_prompts = load_val_prompts(data, self.tokenizer, tools_of=self.agent_loop and self.agent_loop.tools_of)
        warn_of_trained_questions(files.questions(), self.val_prompts)
        check_examples(self.agent_loop, self.val_prompts)
        self.reward = RewardLayer(self.config)
        self.reward.check(self.val_prompts, self.tokenizer)

    def longest(self) -> dict[str, tuple[int, int]]:
        """Return the tokens of the longest demonstration, which nothing follows, and of the longest question."""
        return {**super().longest(), "data.train_files": (self.stream.files.longest, 0)}

    def fit(self) -> None:
        """Train to the last step. Each iteration trains on a batch of demonstrations."""
        with self.run.running(self.workers, self.agent_loop, self.reward) as self.runner:
            self.validate_before_training()
            for metrics in self.run.steps():
                with metrics.time("step"):
                    batch = self.draw(metrics.step)
                    self.update(batch, metrics)
                self.end_step(batch, metrics)

    def draw(self, step: int) -> TrainBatch:
        """Return the step's demonstrations, which are those of the next ordinals."""
        if self.run.stop.requested:
            raise StopRequested
        first, count = self.collect_state.next_ordinal, self.config.data.train_batch_size
        batch = [self.stream.prompt(ordinal) for ordinal in range(first, first + count)]
        self.collect_state = CollectState(first + count)
        return demonstration_batch(batch, self.tokenizer.pad_token_id)

    def end_step(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        """Measure the step, validate where due, and hand it to the run, which records and saves it."""
        step, trained = metrics.step, count_by_sequence(batch.response_mask, batch.lengths).float()
        state = LoopState(self.kl_controller, self.collect_state)
        metrics.add(
            {
                "sft/tokens_trained": float(trained.sum()),
                "sft/tokens_trained/mean": float(trained.mean()),
                "sft/length/mean": float(batch.lengths.float().mean()),
                "sft/length/max": float(batch.lengths.max()),
                "perf/total_num_tokens": float(batch.tokens),
            }
        )
        epoch = self.stream.epoch(self.collect_state.next_ordinal - 1)
        metrics.add(progress_metrics(metrics, epoch, self.config.learner_ranks))
        if self.run.is_due(self.config.trainer.test_freq, step, state):
            self.validate(metrics)
        self.run.complete(metrics, state)

    def validate(self, metrics: StepMetrics) -> None:
        """Answer the questions with the learner's weights, which engines have not had since the last validation."""
        with metrics.time("update_weights"):
            metrics.add(self.workers.sync_weights(metrics.step))
        super().validate(metrics)
