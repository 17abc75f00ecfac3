"""The counter of bytes that cross Ray, on two ranks and an engine, beside the bytes that the real tokens have."""

from __future__ import annotations

import pytest
import torch
from ray import cloudpickle

from core.cluster.ray_bytes import counting, size_of
from core.cluster.ray_workers import RayWorkers
from core.types import BATCH_FIELDS
from tests.core.engine_contract import ask, sample_all
from tests.core.ray_cluster import cluster_config, local_ray, mixed_batch, write_model
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")  # one Ray, however many test processes


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    model = write_model(tmp_path_factory.mktemp("model"))
    config, cpu = cluster_config(model), torch.device("cpu")
    with local_ray(4):
        made = RayWorkers(config, tiny_tokenizer(), cpu, needs_ref=False, needs_critic=False)
        yield made
        made.close()


def token_bytes(batch):
    """Bytes of the fields that one token of this batch has, as they are stored."""
    return sum(value.element_size() for name, value in batch.stored.items() if BATCH_FIELDS[name].axes == "N")


@pytest.mark.processes
def test_bytes_are_those_that_are_pickled(workers):
    names = ["learner rank 0", "learner rank 1"]
    with counting(workers.watch) as traffic:
        found = workers.watch.call("asked", "call", dict.fromkeys(names, ("fingerprints",)))
    assert traffic.sent == {"asked": 2 * len(cloudpickle.dumps("fingerprints", protocol=5))}
    assert traffic.received == {"asked": sum(len(cloudpickle.dumps(one, protocol=5)) for one in found)}
    workers.watch.call("asked", "call", dict.fromkeys(names, ("fingerprints",)))
    assert workers.watch.traffic is None and traffic.sent.total() < 100  # off again: nothing more was counted


def test_a_cut_view_takes_its_whole_storage():
    """A trap that the counter shows: a view of a few elements is pickled with everything it was cut from."""
    whole = torch.zeros(2**16)
    assert size_of(whole[:8]) > whole.nbytes > 100 * size_of(whole[:8].clone())


@pytest.mark.processes
def test_the_phases_of_a_step(workers):
    """Print bytes by phase, and what a pass sends in multiples of its real tokens' bytes."""
    batch = mixed_batch()
    with counting(workers.watch) as traffic:
        workers.sync_weights(1)
        sample_all(workers.engine, [ask(seed=seed) for seed in range(4)])
        workers.compute_log_probs(batch)
        workers.update_actor(batch, 1.0)
    real = batch.tokens * token_bytes(batch)
    for phase in dict.fromkeys([*traffic.sent, *traffic.received]):
        print(f"{phase:16}sent {traffic.sent[phase]:>10,} B   received {traffic.received[phase]:>10,} B")
    ratios = {phase: traffic.sent[phase] / real for phase in ("old_log_prob", "update_actor")}
    for phase, ratio in ratios.items():
        print(f"{phase:16}sent / ({real:,} B of real tokens): {ratio:.2f}")
    weights = len(list(tiny_model().parameters()))  # their bytes go another way: tests/core/cluster/test_ray_weights.py
    assert 0 < traffic.sent["update_weights"] < 500 * weights
    assert traffic.sent["generate"] and traffic.received["generate"]
    assert all(0.1 < ratio <= 1.2 for ratio in ratios.values())
