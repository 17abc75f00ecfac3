"""The loop of supervised fine-tuning: draw demonstrations, raise their likelihood, validate by
answering questions.

The run, workers, learner and validation are core's. The loop is another one than that of
reinforcement learning, so ``fit`` is written anew here, where a recipe would override hooks:
nothing is collected, and engines get the weights only where a validation needs them.
"""

from __future__ import annotations

import dataclasses

from core.algorithm.kl import KLController
from core.algorithm.sequences import count_by_sequence
from core.config.schema import Config
from core.data.prompts import PromptStream
from core.rollout.collect import CollectState, StopRequested
from core.run import LoopState
from core.tracking.metrics import progress_metrics
from core.trainer import Trainer
from core.types import StepMetrics, TrainBatch
from recipes.sft.demonstration_files import DemonstrationFiles, check_questions, end_ids
from recipes.sft.demonstrations import demonstration_batch


class RaySFTTrainer(Trainer):
    """Fine-tunes on ``data.train_files``; ``data.val_files`` are questions, as in every other
    recipe."""

    def __init__(self, config: Config):
        no_kl = KLController("fixed", 0.0, 0.0, 1)
        super().__init__(config, LoopState(no_kl, CollectState()))

    def load_stream(self) -> PromptStream:
        """Return the demonstrations of ``data.train_files``. Raises InputError."""
        model = self.config.actor_rollout_ref.model
        data = self.config.data
        check_questions(data)
        files = DemonstrationFiles(data, self.tokenizer, end_ids(self.tokenizer, model))
        return PromptStream(data, files, self.config.trainer.seed, keeps_tail=True)

    def longest(self) -> dict[str, tuple[int, int]]:
        """Return the longest demonstration, which nothing follows, and the longest question."""
        longest = super().longest()
        if self.stream is not None:  # answers alone have no demonstrations
            longest["data.train_files"] = (self.stream.files.longest, 0)
        return longest

    def fit(self) -> None:
        """Train to the last step. Each iteration trains on a batch of demonstrations."""
        with self.run.around_loop(self.workers, self.agent_loop, self.reward) as self.runner:
            self.validate_before_training()
            for metrics in self.run.metrics_of_steps():
                with metrics.time("step"):
                    batch = self.draw(metrics.step)
                    self.update(batch, metrics)
                self.end_step(batch, metrics)

    def draw(self, step: int) -> TrainBatch:
        """Return the step's demonstrations, which are those of the next ordinals.

        The last step takes what the epochs have left.
        """
        if self.run.stop.requested:
            raise StopRequested
        first = self.state.collect_state.next_ordinal
        count = min(self.config.data.train_batch_size, self.run.ordinal_limit - first)
        batch = [self.stream.prompt(ordinal) for ordinal in range(first, first + count)]
        collect_state = CollectState(first + count)
        self.state = dataclasses.replace(self.state, collect_state=collect_state)
        return demonstration_batch(batch, self.tokenizer.pad_token_id)

    def end_step(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        """Measure the step, validate where due, and hand it to the run, which records and saves
        it."""
        trained = count_by_sequence(batch.response_mask, batch.lengths).float()
        metrics.add(
            {
                "sft/tokens_trained": float(trained.sum()),
                "sft/tokens_trained/mean": float(trained.mean()),
                "sft/length/mean": float(batch.lengths.float().mean()),
                "sft/length/max": float(batch.lengths.max()),
                "perf/total_num_tokens": float(batch.tokens),
            }
        )
        epoch = self.stream.epoch(self.state.collect_state.next_ordinal - 1)
        metrics.add(progress_metrics(metrics, epoch, self.config.learner_ranks))
        self.validate_and_complete(metrics)

    def validate(self, metrics: StepMetrics) -> None:
        """Answer the questions with the learner's weights, which engines have not had since the
        last validation."""
        with metrics.time("update_weights"):
            metrics.add(self.workers.sync_weights(metrics.step))
        super().validate(metrics)
