"""Bounds of a run's health that follow from the rest of its configuration."""

from __future__ import annotations

from core.config import convert, defaults
from core.config.composition import compose, examine

ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
FULL = [f"{ROLLOUT}.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
HALF = [f"{ROLLOUT}.dtype=bfloat16"]
LOCAL = [f"{ROLLOUT}.name=hf", "trainer.backend=local"]


def test_rounding_alone_is_expected_between_engine_and_learner():
    for overrides, bound in (
        (FULL, 1e-4),
        ([*FULL, *HALF], 0.06),
        ([*FULL, f"{CORRECTION}.bypass_mode=True"], None),
        ([*FULL, *HALF, f"{CORRECTION}.rollout_is=token"], None),
    ):
        config = compose("grpo", ["preset=lab", *overrides])
        assert defaults.logp_diff(config) == bound == config.trainer.health.logp_diff.bound


def test_engine_and_learner_compute_alike_by_default():
    for overrides, engine, learner in (
        (LOCAL, "float32", "float32"),
        ([*LOCAL, *HALF], "bfloat16", "bfloat16"),
        ([*LOCAL, *HALF, FULL[1]], "bfloat16", "float32"),
        ([f"{ROLLOUT}.name=vllm", "trainer.backend=local"], "bfloat16", "bfloat16"),
        ([f"{ROLLOUT}.name=hf", "trainer.backend=ray"], "bfloat16", "bfloat16"),
    ):
        config = examine("ppo", overrides).config
        assert config.actor_rollout_ref.rollout.dtype == engine
        for key in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model"):
            assert convert.get(config, f"{key}.fsdp_config.dtype") == learner
