"""Bounds of a run's health that follow from the rest of its configuration."""

from __future__ import annotations

import pytest

from core.config import compose, health_bounds

FULL = ["actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
HALF = ["actor_rollout_ref.rollout.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (FULL, 1e-4),
        ([*FULL, *HALF], 0.02),
        ([*FULL, "algorithm.rollout_correction.bypass_mode=True"], None),
        ([*FULL, "algorithm.rollout_correction.rollout_is=token"], None),
    ],
)
def test_rounding_alone_is_expected_between_engine_and_learner(overrides, bound):
    config = compose("grpo", ["preset=lab", *overrides])
    assert health_bounds.logp_diff(config) == bound


def test_a_scorer_that_fails_on_a_tenth_of_the_answers_is_reported_by_default():
    judge = ["reward_model.enable=True", "reward_model.judge.url=http://127.0.0.1:9", "reward_model.judge.model=m"]
    for overrides in ([], [*judge, "reward_model.on_error=mask"]):
        assert compose("grpo", ["preset=lab", *overrides]).trainer.health.scorer_errors.bound == 0.1
