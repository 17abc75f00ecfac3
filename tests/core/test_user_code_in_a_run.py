"""Whole runs with a user's own estimator and loss, named by path; and scoring beside decoding."""

from __future__ import annotations

import asyncio
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.ray_trainer import RayPPOTrainer
from core.types import Prompt, Trajectory
from tests.core.ray_cluster import cluster_config, write_model

ESTIMATOR = """
import torch
CALLS = []
def centred(inputs):
    CALLS.append(inputs.index.tolist() if hasattr(inputs, "index") else True)
    advantages = torch.where(inputs.response_mask, 0.5, 0.0)
    return advantages, advantages
"""
LOSS = """
CALLS = []
def surprise(inputs):
    CALLS.append(float(inputs.advantages[inputs.mask].mean()))
    return -inputs.advantages * inputs.log_prob, {"my_number": 3.0 + 0.0 * inputs.log_prob.detach()}
"""


@pytest.fixture
def config(tmp_path):
    rows = [
        {
            "data_source": "multiply",
            "prompt": f"{at}*2",
            "reward_model": {"style": "rule", "ground_truth": str(2 * at)},
            "extra_info": {"index": at, "split": "train"},
        }
        for at in range(16)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    fixed = {
        "data.train_files": tmp_path / "rows.parquet",
        "data.val_files": tmp_path / "rows.parquet",
        "trainer.backend": "local",
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.val_before_train": False,
    }
    model = write_model(tmp_path / "model")

    def make(*overrides, recipe="grpo"):
        return cluster_config(
            model, *(f"{key}={value}" for key, value in fixed.items()), *overrides, recipe=recipe
        )

    return make


def metrics(folder):
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def module_of(path):
    return next(
        module for module in sys.modules.values() if getattr(module, "__file__", None) == str(path)
    )


@pytest.mark.parametrize("by", ["file", "module"])
def test_an_estimator_and_a_loss_of_the_users_own_train(tmp_path, config, monkeypatch, by):
    files = {}
    for name, text in {"estimator": ESTIMATOR, "loss": LOSS}.items():
        (tmp_path / f"my_{by}_{name}.py").write_text(text)
        files[name] = str(tmp_path / f"my_{by}_{name}.py")
    paths = files if by == "file" else {name: f"my_module_{name}" for name in files}
    monkeypatch.syspath_prepend(str(tmp_path))
    made = config(
        f"algorithm.adv_estimator={paths['estimator']}:centred",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={paths['loss']}:surprise",
    )
    RayPPOTrainer(made).init_workers().fit()
    modules = {name: module_of(path) for name, path in files.items()}
    assert len(modules["estimator"].CALLS) == 2  # a step each
    assert len(modules["loss"].CALLS) >= 4 and set(modules["loss"].CALLS) == {0.5}
    for line in metrics(tmp_path)[-2:]:
        assert line["critic/advantages/mean"] == 0.5
        assert line["actor/my_number"] == pytest.approx(3.0)


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_answers_are_scored_while_others_still_decode(config, manager):
    """The last sample is held back until a verdict is there: a loop that scores afterwards would
    wait in vain."""
    events, verdict = [], asyncio.Event()
    long = ["data.max_response_length=40", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128"]
    trainer = RayPPOTrainer(config(f"reward_model.reward_manager={manager}", *long)).init_workers()
    engine_sample, score = trainer.workers.engine.sample, trainer.reward.score

    async def sample(request) -> Trajectory:
        trajectory = await engine_sample(request)
        if events.count("decoded") == 15:
            await asyncio.wait_for(verdict.wait(), 120)
        events.append("decoded")
        return trajectory

    async def scored(prompt: Prompt, trajectory: Trajectory):
        result = await score(prompt, trajectory)
        events.append("scored")
        verdict.set()
        return result

    trainer.workers.engine.sample, trainer.reward.score = sample, scored
    groups = asyncio.run(one_step(trainer))
    trainer.workers.close()
    trainer.reward.close()
    assert len(groups) == 8 and events.count("scored") == events.count("decoded") == 16


async def one_step(trainer):
    trainer.workers.sync_weights(0)
    return await asyncio.gather(*(trainer.generate_group(ordinal) for ordinal in range(8)))
