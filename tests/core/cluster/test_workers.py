"""One process: where engine and learner compute in the same precision they have one copy of the
weights."""

import numpy as np
import pytest
import torch

from core.cluster.workers import LocalWorkers
from core.learner.passes import probe_ids, probe_log_probs
from tests.core.ray_cluster import cluster_config, mixed_batch, write_model
from tests.optimizer_steps import update_actor
from tests.tiny import tiny_tokenizer

IDS = probe_ids(64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), arch="llama", tie_word_embeddings=True)


def workers(folder, *overrides):
    config = cluster_config(folder, "trainer.backend=local", *overrides)
    return LocalWorkers(
        config, tiny_tokenizer(), torch.device("cpu"), needs_ref=False, needs_critic=False
    )


def places(module):
    return {name: one.data_ptr() for name, one in module.named_parameters()}


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_rank=2"]
)
def test_the_engine_reads_the_weights_that_the_learner_trains(folder, tmp_path, key):
    one = workers(folder, key)
    assert places(one.engine.model) == places(one.models.actor.module)
    before = one.engine.probe(IDS)
    update_actor(one, mixed_batch())
    assert one.sync_weights(3) == {} and one.engine.policy_version == 3
    after = one.engine.probe(IDS)
    assert np.abs(after - before).max() > 1e-3
    policy = one.models.actor.module.config.vocab_size
    assert (
        np.abs(one.engine.probe(probe_ids(policy)) - probe_log_probs(one.models.actor)).max() < 1e-5
    )
    trained = {
        name for name, value in one.models.actor.module.named_parameters() if value.requires_grad
    }
    assert trained == {
        name for name in places(one.models.actor.module) if ".lora_" in name or key.endswith("=0")
    }
    assert not any(value.requires_grad for value in one.engine.model.parameters())
    assert one.engine.model.config is not one.models.actor.module.config  # their attentions differ
    one.save(tmp_path)
    update_actor(one, mixed_batch())
    one.load(tmp_path)  # a checkpoint that is read again reaches the engine
    assert np.array_equal(one.engine.probe(IDS), after)


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
    ],
)
def test_what_the_engine_computes_otherwise_has_a_copy(folder, key):
    one = workers(folder, key)
    assert not set(places(one.engine.model).values()) & set(
        places(one.models.actor.module).values()
    )
    update_actor(one, mixed_batch())
    assert 0 <= one.sync_weights(1)["rollout_corr/probe_diff"] < 0.2
