"""Ids that the tokenizer does not know: no engine samples them, and engine and learner agree on
what is left."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.cluster.workers import LocalWorkers
from core.data.vocabulary import end_ids, known_ids, unknown_among
from core.learner.batching import make_batch
from core.learner.models import load_policy
from core.types import Prompt, ScoredGroup
from reward_scores.score import Score
from tests.core.engine_contract import HELLO, ask, sample_all
from tests.core.ray_cluster import cluster_config, write_model
from tests.optimizer_steps import update_actor
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

CPU, SPARE = torch.device("cpu"), 60
# That vLLM's CPU build has kernels for
SHAPE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
VLLM = (
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.enforce_eager=True"),
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",
)
LOCAL = (
    *("trainer.backend=local", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
    "actor_rollout_ref.actor.use_kl_loss=False",
)
IN_VLLM = (
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.processes,
)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_ids_do_not_lie_where_sleep_gives_memory_away():
    """vLLM's second runner makes processors among the weights, whose memory sleep discards."""
    from core.engines.vllm import UNKNOWN, UnknownIds

    config = SimpleNamespace(additional_config={UNKNOWN: [6, 7]})
    processor = UnknownIds(config, SimpleNamespace(device=torch.device("meta")))
    barred = processor.apply(torch.zeros(1, 8))[0].isinf().tolist()
    assert barred == [False] * 6 + [True] * 2


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A model of 160 ids and a tokenizer of 100."""
    return write_model(tmp_path_factory.mktemp("padded"), vocab_size=VOCAB_SIZE + SPARE, **SHAPE)


@pytest.mark.parametrize("engine", [(), pytest.param(VLLM, marks=IN_VLLM)], ids=["hf", "vllm"])
def test_they_are_never_sampled_and_have_no_probability_anywhere(padded, engine):
    config = cluster_config(padded, *LOCAL, *engine)
    words = tiny_tokenizer()
    one = LocalWorkers(config, words, CPU, needs_ref=False, needs_critic=False)
    try:
        one.sync_weights(0)
        settings = ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9})
        requests = [
            ask(seed=i, max_tokens=16, ignore_eos=True, **settings[i % 4]) for i in range(32)
        ]
        sampled = sample_all(one.engine, requests)
        assert max(t.response_ids.max() for t in sampled) < VOCAB_SIZE
        plain = tuple(sampled[::4])
        prompt = Prompt(0, "q", tuple(HELLO), (), None, "test")
        batch = make_batch([ScoredGroup(prompt, plain, tuple(Score(0.0) for _ in plain))], 0)
        log_probs, entropy, *_ = one.compute_log_probs(batch)
        found = log_probs[batch.response_mask].numpy()
        np.testing.assert_allclose(found, np.concatenate([t.logprobs for t in plain]), atol=1e-4)
        assert torch.isfinite(entropy).all() and entropy.max() <= np.log(VOCAB_SIZE)
        head = one.models.actor.module.get_output_embeddings().weight
        before = head.detach().clone()
        update_actor(one, batch.adding(advantages=torch.ones_like(log_probs)))
        moved = (head.detach() - before)[VOCAB_SIZE:].abs().max()
        # Weight decay alone
        assert moved < 1e-3 < (head.detach() - before)[:VOCAB_SIZE].abs().max()
    finally:
        one.close()


def test_holes_in_a_vocabulary_are_unknown_too():
    known = np.array([True, False, True])
    assert unknown_among(known, 5).tolist() == [1, 3, 4] and unknown_among(known, 2).tolist() == [1]
    assert (
        unknown_among(None, 5).tolist()
        == []
        == unknown_among(known_ids(tiny_tokenizer()), VOCAB_SIZE).tolist()
    )


def test_a_model_without_weights_has_all_ends_of_its_generation_config(tmp_path):
    """vLLM and SGLang get such a model: they would sample on past the second end."""
    from transformers import GenerationConfig

    config = cluster_config(write_model(tmp_path))
    GenerationConfig(eos_token_id=[1, 50, 51]).save_pretrained(tmp_path)
    for on_meta in (False, True):
        model = load_policy(config.actor_rollout_ref.model, on_meta=on_meta)
        assert end_ids(tiny_tokenizer(), model.generation_config) == {1, 50, 51}
