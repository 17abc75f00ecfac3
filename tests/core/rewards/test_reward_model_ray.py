"""The reward model as a Ray actor: the same scores as in process, and no loss goes unnoticed."""

from __future__ import annotations

import asyncio
import math
import os
import signal

import pytest
import ray

from core.cluster.ray_engine import RayRewardModel
from core.errors import WorkersLost
from core.ray_trainer import RayPPOTrainer
from core.rewards.batch_calls import Answer
from tests.core.reward_model_runs import metrics, run_config

pytestmark = pytest.mark.xdist_group("ray")  # one Ray, however many test processes


@pytest.mark.slow
def test_the_same_run_on_ray_has_the_model_in_its_own_process(tmp_path):
    """The first step's samples are the same, so the scores are, up to the engine's rounding."""
    for backend in ("local", "ray"):
        folder = tmp_path / backend
        folder.mkdir()
        RayPPOTrainer(run_config(folder, f"trainer.backend={backend}", "reward_model.weight=0.25")).init_workers().fit()
    local, remote = (metrics(tmp_path / backend)[-2:] for backend in ("local", "ray"))
    for name in ("reward/model/mean", "critic/score/mean"):
        assert remote[0][name] == pytest.approx(local[0][name], abs=0.02) and math.isfinite(remote[1][name])


def test_a_dead_or_broken_judge_ends_the_step_on_ray(tmp_path):
    trainer = RayPPOTrainer(run_config(tmp_path, "trainer.backend=ray")).init_workers()
    try:
        actor = trainer.workers.watch.actors[RayRewardModel.NAME]
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkersLost, match="reward model died"):
            asyncio.run(trainer.workers.reward_model([Answer((), "x", (5,))]))
    finally:
        trainer.workers.close()
        trainer.reward.close()
