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


@pytest.mark.parametrize(
    ("overrides", "exact"),
    [
        (FULL, True),
        ([*FULL, "algorithm.rollout_correction.rollout_is=token"], True),
        ([*FULL, *HALF], False),
        ([*FULL, "trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"], False),
        ([*FULL, "actor_rollout_ref.rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is=token"], False),
        ([*FULL, "actor_rollout_ref.rollout.engine_kwargs.hf.logits_noise=0.1"], False),
    ],
)
def test_engine_and_learner_agree_exactly_where_nothing_but_rounding_parts_them(overrides, exact):
    assert health_bounds.exact(compose("grpo", ["preset=lab", *overrides])) is exact


def test_a_scorer_may_fail_only_where_a_judge_is_asked():
    assert health_bounds.scorer_errors(compose("grpo", ["preset=lab"])) is None
    judge = ["reward_model.enable=True", "reward_model.judge.url=http://127.0.0.1:9", "reward_model.judge.model=m"]
    judge += ["reward_model.on_error=mask"]
    assert health_bounds.scorer_errors(compose("grpo", ["preset=lab", *judge])) == 0.1
