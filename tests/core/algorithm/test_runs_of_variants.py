"""Whole runs of the losses and estimators that need more than a ratio: what a step must compute for
them is there."""

from __future__ import annotations

import pytest

from core.config.composition import compose
from core.ray_trainer import RayPPOTrainer
from tests.faults.tiny_run import command, prepare

ACTOR = "actor_rollout_ref.actor"
SELECTS = (f"{ACTOR}.policy_loss.kl_cov_ratio=0.2", f"{ACTOR}.policy_loss.ppo_kl_coef=1.0")
CASES = {
    "clip_cov": (
        *(f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0.2"),
        *(f"{ACTOR}.policy_loss.clip_cov_lb=-9", "algorithm.adv_estimator=rloo"),
        # One optimizer step: the pass for old log-probs is made for the choice alone
        f"{ACTOR}.ppo_mini_batch_size=4",
    ),
    "kl_cov_bypass": (
        *(f"{ACTOR}.policy_loss.loss_mode=kl_cov", *SELECTS),
        "algorithm.rollout_correction.bypass_mode=True",  # the engine's log-probs choose
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    prepare(made)
    return made


def trained(folder, run, *overrides):
    """Return the metrics of two steps and the policy's weights after them."""
    words = command(folder, "grpo", 2, *overrides)(run)[3:]
    fixed = (
        "trainer.backend=local",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
    )
    trainer = RayPPOTrainer(compose("grpo", [*words, *fixed])).init_workers()
    seen = []
    update = trainer.workers.update_actor

    def watched(steps, rate):
        steps = list(steps)
        metrics = update(steps, rate)
        seen.append((steps[0], metrics))
        return metrics

    trainer.workers.update_actor = watched
    trainer.fit()
    weights = [
        parameter.detach().clone() for parameter in trainer.workers.models.actor.module.parameters()
    ]
    return seen, weights


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_it_trains_alike_with_any_token_budget(case, folder, tmp_path):
    budgets = (f"{ACTOR}.ppo_max_token_len_per_gpu=512", f"{ACTOR}.ppo_max_token_len_per_gpu=80")
    runs = [
        trained(folder, tmp_path / str(at), *CASES[case], budget)
        for at, budget in enumerate(budgets)
    ]
    (seen, weights), (others, other_weights) = runs
    for (batch, metrics), (_, other) in zip(seen, others, strict=True):
        assert batch.has("old_log_probs") == ("bypass" not in case)
        assert metrics["actor/grad_norm"] > 0
        assert 0 < metrics["actor/cov_selected"] < 0.5
        assert other["actor/cov_selected"] == pytest.approx(metrics["actor/cov_selected"], abs=1e-9)
        assert other["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], abs=1e-5)
    for one, other in zip(weights, other_weights, strict=True):
        # AdamW's first steps move a weight whose gradient is rounding by the whole rate: one may be
        assert int(((one - other).abs() >= 1e-4).sum()) <= 1
