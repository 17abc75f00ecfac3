"""The weight sync of a cluster: real Ray, real ranks, real engines; what is planted in their
processes is noticed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray")

import ray
import torch
from ray import cloudpickle

from core.cluster.ray_workers import RayWorkers
from core.errors import InputError, WorkersLost
from tests.core.ray_cluster import cluster_config, local_ray, mixed_batch, write_model
from tests.optimizer_steps import update_actor
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("ray")]
CPU = torch.device("cpu")
APART = ("actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.n_gpus_per_node=2")
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(32):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def start(model, *settings):
    return RayWorkers(
        cluster_config(model, *settings), tiny_tokenizer(), CPU, needs_ref=False, needs_critic=False
    )


@pytest.fixture(scope="module")
def beside(model):
    """Two ranks with an engine beside them."""
    workers = start(model)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def apart(model):
    """Two ranks, and two engines in a pool of their own."""
    workers = start(model, *APART)
    yield workers
    workers.close()


def call(actor, function, *arguments):
    return ray.get(actor.__ray_call__.remote(function, *arguments))


def narrow(workers, share=6):
    """Let a sync take several buckets: bytes of a ``share``-th of the model, and room for its
    largest weight."""
    weights = call(workers.learners[0], lambda self: self.learner.weights(torch.float32))
    sizes = [weight.room for weight in weights]
    workers.bucket_bytes = max(max(sizes), sum(sizes) // share)
    return weights, workers.bucket_bytes


def train(workers):
    update_actor(workers, mixed_batch())


def stored(workers):
    """Return the weights of the first engine, by name."""
    state = call(
        workers.watch.actors["engine 0"], lambda self: dict(self.engine.model.named_parameters())
    )
    return {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.parametrize("kind", ["beside", "apart"])
def test_every_weight_arrives_bucket_by_bucket(kind, request, monkeypatch):
    workers = request.getfixturevalue(kind)
    train(workers)
    weights, limit = narrow(workers)
    loaded, load = [], workers.engine.load
    monkeypatch.setattr(
        workers.engine, "load", lambda bucket, others: loaded.append(bucket) or load(bucket, others)
    )
    assert workers.sync_weights(3)["rollout_corr/probe_diff"] < 1e-5
    assert len(loaded) >= 3 and all(bucket.size <= limit for bucket in loaded)
    assert [weight for bucket in loaded for weight in bucket.weights] == weights
    expected = call(
        workers.learners[0],
        lambda self: dict(self.learner.models.actor.module.named_parameters()).keys(),
    )
    assert stored(workers).keys() == expected
    assert sum(len(cloudpickle.dumps(one)) for one in loaded) < 1_000 * len(weights), (
        "where the bytes are, not they"
    )


def test_adapters_arrive_merged(model):
    pytest.importorskip("peft")
    workers = start(model, *LORA)
    try:
        workers.sync_weights(1)
        before = stored(workers)
        train(workers)
        assert workers.sync_weights(2)["rollout_corr/probe_diff"] < 1e-5
        after = stored(workers)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved and all("proj" in name for name in moved) and before.keys() == after.keys()
    finally:
        workers.close()


def test_nothing_is_left_in_memory(beside):
    beside.sync_weights(5)
    for actor in beside.learners:
        left = call(
            actor, lambda _: [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
        )
        assert left and not [path for path in left if "memfd:weights" in path]


# -- what goes wrong


def flip(self):
    """Change a bit of each bucket that arrives at an engine, whose process this is, before it is
    summed."""
    from core.engines import weight_buckets  # the process's own: this function comes by value

    checksum = weight_buckets.checksum

    def changed(data):
        data[len(data) // 2] ^= 1
        return checksum(data)

    weight_buckets.checksum = changed
    self.restore = lambda: setattr(weight_buckets, "checksum", checksum)


@pytest.mark.parametrize("kind", ["beside", "apart"])
def test_a_changed_bit_is_noticed(kind, request):
    workers = request.getfixturevalue(kind)
    narrow(workers)
    engine = workers.watch.actors["engine 0"]
    call(engine, flip)
    try:
        with pytest.raises(WorkersLost, match="other bytes than were sent|engine 1 and engine 0"):
            workers.sync_weights(8)
    finally:
        call(engine, lambda self: self.restore())
    assert workers.sync_weights(9)["rollout_corr/probe_diff"] < 1e-5


def test_an_engine_with_other_weights_than_its_replica_is_noticed(apart):
    """The bytes arrived, but did not all reach the model: only checksums of what the engines hold
    can tell."""

    def plant(self):
        finish = self.engine._finish

        def touched():
            next(iter(self.engine.model.parameters())).data.view(-1)[7] += 1e-6
            return finish()

        self.engine._finish = touched

    call(apart.watch.actors["engine 1"], plant)
    try:
        with pytest.raises(WorkersLost, match="engine 1 and engine 0 have different weights"):
            apart.sync_weights(4)
    finally:
        call(apart.watch.actors["engine 1"], lambda self: self.engine.__dict__.pop("_finish"))
    apart.sync_weights(5)


def test_a_bucket_that_is_too_small_names_the_key(beside, monkeypatch):
    monkeypatch.setattr(beside, "bucket_bytes", 1000)
    with pytest.raises(InputError, match="update_weights_bucket_megabytes=0: .* set at least 1"):
        beside.sync_weights(6)


def test_an_engine_that_dies_in_mid_transfer_ends_the_sync_at_once(apart):
    """The last test of the two engines: one of them is no more."""

    def plant(self):
        load, seen = self.engine.load, []

        def last_words(bucket):
            seen.append(bucket)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            load(bucket)

        self.engine.load = last_words

    narrow(apart)
    call(apart.watch.actors["engine 1"], plant)
    with pytest.raises(WorkersLost, match="engine 1 died in phase update_weights"):
        apart.sync_weights(10)


def test_probes_of_wrong_weights_end_the_run(beside, monkeypatch):
    probes = beside.engine.probes
    monkeypatch.setattr(beside.engine, "probes", lambda ids: [one + 1 for one in probes(ids)])
    with pytest.raises(WorkersLost, match="stale"):
        beside.sync_weights(2)
    monkeypatch.setattr(
        beside.engine,
        "probes",
        lambda ids: [np.where(np.arange(len(one)) == 3, one - 1, one) for one in probes(ids)],
    )
    assert beside.sync_weights(3)["rollout_corr/probe_diff"] > 0.9  # one token of 23: an outlier


VLLM = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.enforce_eager=True")
SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"


@pytest.mark.slow
@pytest.mark.parametrize("where", [(), APART], ids=["beside", "apart"])
def test_both_processes_of_a_vllm_engine_get_every_weight(tmp_path, where):
    pytest.importorskip("vllm")
    workers = start(write_model(tmp_path, hidden_size=128), *VLLM, SPLIT, *where)
    try:
        assert workers.engine.engines == ["engine 0"]
        for version in (1, 2):
            train(workers)
            narrow(workers)
            assert workers.sync_weights(version)["rollout_corr/probe_diff"] < 1e-4
    finally:
        workers.close()
