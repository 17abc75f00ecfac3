"""What is known of a model before its weights are read."""

from __future__ import annotations

import pytest

from core.checkpoint.provenance import ModelFingerprint
from core.config import compose
from core.learner.models import load_critic
from core.learner.saving import planned_fingerprints
from tests.tiny import tiny_model, tiny_tokenizer

MODELS = {"qwen2": ("qwen2", {}), "tied": ("llama", {"tie_word_embeddings": True}), "gpt2": ("gpt2", {})}


@pytest.mark.parametrize("name", MODELS)
def test_fingerprints_are_known_before_the_weights_are(name, tmp_path):
    arch, overrides = MODELS[name]
    model = tiny_model(arch, **overrides)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = compose("ppo", [f"actor_rollout_ref.model.path={tmp_path}"])
    critic = load_critic(config.critic.model, seed=1)
    expected = {"actor": ModelFingerprint.of(model), "critic": ModelFingerprint.of(critic)}
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    assert planned_fingerprints(config, critic=True) == expected
    assert planned_fingerprints(config, critic=False) == {"actor": expected["actor"]}
    other = compose(
        "ppo", [f"actor_rollout_ref.model.path={tmp_path}", "+actor_rollout_ref.model.override_config.vocab_size=101"]
    )
    assert planned_fingerprints(other, critic=False) != {"actor": expected["actor"]}
