"""Which rows a step sends to each learner rank: shared out over groups of ranks, and put together
again."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import ray
import torch

from core.cluster.ray_processes import LearnerProcess
from core.cluster.ray_workers import RayWorkers
from core.types import TrainBatch
from tests.core.ray_cluster import cluster_config, mixed_batch
from tests.optimizer_steps import update_actor

ACTOR = "actor_rollout_ref.actor"


class Learner:
    """Stands for the models of a learner rank: passes find the token ids, the update nothing.

    ``asked`` has the batches.
    """

    def __init__(self):
        self.asked: list = []

    def compute_log_probs(self, batch: TrainBatch) -> tuple[torch.Tensor, ...]:
        self.asked.append(batch)
        return batch.input_ids.float(), -batch.input_ids.float()

    def compute_values(self, batch: TrainBatch) -> tuple[torch.Tensor]:
        return self.compute_log_probs(batch)[:1]

    def update_actor(self, steps: list[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        self.asked.append(steps)
        return {"loss": 1.0}


class Wire:
    """Stands for the watch over four ranks; ``sent`` has the bytes of the objects that are put."""

    def __init__(self):
        self.processes, self.sent = [object.__new__(LearnerProcess) for _ in range(4)], 0
        for process in self.processes:
            process.learner = SimpleNamespace(models=Learner())

    def put(self, value):
        self.sent += len(pickle.dumps(value, 5))
        return value

    def call(self, phase: str, method: str, arguments: dict[str, tuple]) -> list:
        return [
            getattr(one, method)(*a)
            for one, a in zip(self.processes, arguments.values(), strict=True)
        ]


@pytest.fixture(params=["ulysses_sequence_parallel_size", "tensor_model_parallel_size"])
def workers(request, tmp_path, monkeypatch):
    """The phases over four ranks in two groups, which have no process behind them."""
    key = request.param
    packed = [f"{part}.model.use_remove_padding=True" for part in ("actor_rollout_ref", "critic")]
    workers = object.__new__(RayWorkers)
    config = cluster_config(
        tmp_path, f"{ACTOR}.{key}=2", f"{ACTOR}.ppo_mini_batch_size=8", *packed, ranks=4
    )
    workers.config, workers.ranks, workers.device, workers.watch = (
        config,
        4,
        torch.device("cpu"),
        Wire(),
    )
    monkeypatch.setattr(ray, "put", workers.watch.put)
    return workers


def test_neighbours_that_split_sequences_or_layers_get_the_same_rows(workers):
    """The critic's ranks share nothing."""
    batch = mixed_batch()
    written = batch.input_ids * batch.response_mask
    log_probs, entropies = workers.compute_log_probs(batch)
    assert torch.equal(log_probs, written.float()) and torch.equal(entropies, -written.float())
    assert torch.equal(workers.compute_values(batch), written.float())
    assert update_actor(workers, batch) == {"loss": 1.0}
    passes, values, update = zip(
        *(process.learner.models.asked for process in workers.watch.processes), strict=True
    )
    for first, second, third, fourth in (passes, [steps[0] for steps in update]):
        assert first is second and third is fourth and len(first) + len(third) == len(batch)
    assert sum(map(len, values)) == len(batch)
    assert float(sum(steps[0].loss_weight.sum() for steps in update[::2])) == pytest.approx(1.0)


def test_batches_cross_once_without_padding_and_with_the_fields_of_their_phase(workers):
    batch = mixed_batch(groups=200)
    assert batch.tokens < 0.6 * len(batch) * int(batch.lengths.max()), "padding would be no more"
    for phase, token_bytes in (
        (lambda: workers.compute_log_probs(batch), 5),
        (lambda: update_actor(workers, batch), 21),
    ):
        workers.watch.sent = 0
        phase()
        assert workers.watch.sent < 1.25 * token_bytes * batch.tokens
