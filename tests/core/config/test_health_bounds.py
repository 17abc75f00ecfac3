"""Bounds of a run's health that follow from the rest of its configuration."""

from __future__ import annotations

import pytest

from core.config import compose, convert, defaults, examine

FULL = ["actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
WEIGHTED = "algorithm.rollout_correction.rollout_is=token"
HALF = ["actor_rollout_ref.rollout.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (FULL, 1e-4),
        ([*FULL, *HALF], 0.06),
        ([*FULL, "algorithm.rollout_correction.bypass_mode=True"], None),
        ([*FULL, *HALF, WEIGHTED], None),
    ],
)
def test_rounding_alone_is_expected_between_engine_and_learner(overrides, bound):
    config = compose("grpo", ["preset=lab", *overrides])
    assert defaults.logp_diff(config) == bound == config.trainer.health.logp_diff.bound


LOCAL = ["actor_rollout_ref.rollout.name=hf", "trainer.backend=local"]


@pytest.mark.parametrize(
    ("overrides", "engine", "learner"),
    [
        (LOCAL, "float32", "float32"),
        ([*LOCAL, *HALF], "bfloat16", "bfloat16"),
        ([*LOCAL, "actor_rollout_ref.actor.fsdp_config.dtype=bf16"], "bf16", "bf16"),
        ([*LOCAL, *HALF, FULL[1]], "bfloat16", "float32"),
        (["actor_rollout_ref.rollout.name=vllm", "trainer.backend=local"], "bfloat16", "bfloat16"),
        (["actor_rollout_ref.rollout.name=hf", "trainer.backend=ray"], "bfloat16", "bfloat16"),
    ],
)
def test_engine_and_learner_compute_alike_by_default(overrides, engine, learner):
    config = examine("ppo", overrides).config
    assert config.actor_rollout_ref.rollout.dtype == engine
    for key in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model"):
        assert convert.get(config, f"{key}.fsdp_config.dtype") == learner
    assert config.reward_model.model.fsdp_config.dtype == "bfloat16"
