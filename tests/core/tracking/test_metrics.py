"""Metrics of a step that follow from its others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import compose
from core.tracking.metrics import data_metrics, progress_metrics
from core.types import Prompt, ScoredGroup, Segment, StepMetrics, Stop, Trajectory
from reward_scores.score import Score
from tests.padded import batch_of_padded

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ([], 1),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], 1),  # the trainer's own process holds the only learner
        (["trainer.backend=ray", "trainer.nnodes=2", "trainer.n_gpus_per_node=4"], 8),
        (["trainer.backend=ray", "trainer.device=cpu", "trainer.n_gpus_per_node=2"], 2),
    ],
)
def test_throughput_is_a_gpus_share_as_verl_counts_it(arguments, ranks):
    """verl's compute_throughout_metrics: total_num_tokens / (time * n_gpus)."""
    config = compose("grpo", arguments)
    assert config.learner_ranks == ranks
    metrics = StepMetrics(3)
    metrics.add({"timing_s/step": 20.0})
    answer = Trajectory([1] * 10, [2] * 5, [True] * 5, [0.0] * 5, (Segment("policy", "x"),), Stop.EOS, 2, 0)
    groups = [ScoredGroup(Prompt(0, 0, 0, (1,) * 10, "", {}), (answer,) * 4, (Score(1.0, {"score": 1.0}),) * 4)]
    fields = {"attention_mask": torch.ones(4, 15, dtype=torch.bool), "reward": torch.ones(4)}
    batch = batch_of_padded(**fields, response_mask=torch.arange(15).expand(4, -1) >= 10)
    metrics.add(data_metrics(groups, batch))
    assert progress_metrics(metrics, 0, config.learner_ranks)["perf/throughput"] == pytest.approx(60 / 20 / ranks)
