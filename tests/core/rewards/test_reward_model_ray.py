"""The reward model as a Ray actor: the same scores as in process, and no loss goes unnoticed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import ray

from core.cluster.ray_engine import REWARD_MODEL
from core.errors import WorkersLost
from core.ray_trainer import RayPPOTrainer
from core.rewards.grading import Answer
from core.rewards.reward_model import RewardModel
from tests.core.rewards.reward_model_runs import answers, run_config

pytestmark = pytest.mark.xdist_group("ray")  # one Ray, however many test processes


@pytest.mark.processes
def test_an_actor_grades_as_one_process_and_a_dead_one_ends_the_step(tmp_path):
    config = run_config(tmp_path, "trainer.backend=ray")
    trainer = RayPPOTrainer(config).init_workers()
    try:
        graded = asyncio.run(trainer.workers.reward_model(answers()))
        assert graded == RewardModel(config.reward_model).score(answers())
        actor = trainer.workers.watch.actors[REWARD_MODEL]
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkersLost, match="reward model died"):
            asyncio.run(trainer.workers.reward_model([Answer((), "x", (5,))]))
    finally:
        trainer.workers.close()
        trainer.reward.close()
