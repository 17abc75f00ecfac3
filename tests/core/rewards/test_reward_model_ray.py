"""The reward model as Ray actors: the same scores as in process, and no loss goes unnoticed."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray

from core.cluster.ray_engine import RayRewardModel
from core.errors import WorkersLost
from core.ray_trainer import RayPPOTrainer
from core.rewards.grading import Answer, ModelScore
from core.rewards.reward_model import RewardModel
from tests.core.rewards.reward_model_runs import answers, metrics, run_config

pytestmark = pytest.mark.xdist_group("ray")  # one Ray, however many test processes


class Lengths:
    """An actor that counts tokens, and the calls that it got."""

    def __init__(self):
        self.calls, self.score = [], self

    def remote(self, given):
        self.calls.append([len(answer.token_ids) for answer in given])
        future = Future()
        future.set_result([ModelScore(float(length)) for length in self.calls[-1]])
        return SimpleNamespace(future=lambda: future)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_every_rank_is_called_with_a_fair_share_and_each_answer_gets_its_own_score(count):
    actors = {"a": Lengths(), "b": Lengths(), "c": Lengths()}
    model = RayRewardModel(SimpleNamespace(actors=actors, timeout_s=60), list(actors))
    graded = answers(count)
    lengths = [len(answer.token_ids) for answer in graded]
    assert [one.value for one in asyncio.run(model(graded))] == lengths
    ((a,), (b,), (c,)) = (actor.calls for actor in actors.values())
    assert sorted(a + b + c) == sorted(lengths) and max(map(sum, (a, b, c))) <= sum(lengths) / 3 + max(lengths)


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


@pytest.mark.processes
def test_two_ranks_grade_as_one_process_and_a_dead_one_ends_the_step(tmp_path):
    pool = ("enable_resource_pool=True", "nnodes=1", "n_gpus_per_node=2")
    config = run_config(tmp_path, "trainer.backend=ray", *(f"reward_model.{key}" for key in pool))
    trainer = RayPPOTrainer(config).init_workers()
    try:
        graded = asyncio.run(trainer.workers.reward_model(answers()))
        expected = RewardModel(config.reward_model).score(answers())
        assert [one.value for one in graded] == pytest.approx([one.value for one in expected], abs=1e-5)
        actor = trainer.workers.watch.actors[f"{RayRewardModel.NAME} rank 1"]
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkersLost, match="reward model rank 1 died"):
            asyncio.run(trainer.workers.reward_model([Answer((), "x", (5,))]))
    finally:
        trainer.workers.close()
        trainer.reward.close()
