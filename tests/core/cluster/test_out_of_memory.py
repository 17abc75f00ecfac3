"""A run that runs out of memory ends with one line: phase, process, amounts, knobs; in process and over Ray."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from core.cluster import learner_rank
from core.cluster.ray_workers import RayWorkers
from core.cluster.workers import LocalWorkers
from core.command_line import work
from core.config import compose, convert
from core.engines.hf import HFEngine
from core.errors import MEMORY_KEYS, OutOfMemory, out_of_memory
from core.learner.learner import Actor, Critic
from core.learner.passes import Policy
from core.ray_trainer import RayPPOTrainer
from tests.core.engine_contract import ask
from tests.core.ray_cluster import cluster_config, local_ray, write_model
from tests.faults.tiny_run import command, prepare
from tests.tiny import tiny_tokenizer

ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 18.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which 2.90 GiB is "
    "free. Process 41 has 1.20 GiB memory in use. Including non-PyTorch memory, this process has 76.20 GiB memory in "
    "use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but "
    "unallocated."
)
TRAINER = "core.ray_trainer:RayPPOTrainer"


def fail(*_, **__):
    raise torch.OutOfMemoryError(ON_A_GPU)


# phase -> what is planted: an owner and its method that fails
PLANTED = {
    "load": (learner_rank, "load_critic"),
    "update_weights": (HFEngine, "update_weights"),
    "gen": (HFEngine, "sample"),
    "old_log_prob": (Actor, "log_probs"),
    "ref": (Policy, "log_probs"),
    "values": (Critic, "values"),
    "update_critic": (Critic, "update"),
    "update_actor": (Actor, "update"),
    "save_checkpoint": (LocalWorkers, "save"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare(folder)
    return folder


def configured(files: Path, folder: Path, *overrides: str):
    more = ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.max_restarts=3", "trainer.val_before_train=False"]
    return compose("ppo", command(files, "ppo", 2, *more, *overrides)(folder)[3:])


def last_line(capsys) -> str:
    told = capsys.readouterr().err
    assert "restart" not in told
    return told.splitlines()[-1]


@pytest.mark.parametrize("phase", PLANTED)
def test_the_run_ends_with_a_line_that_names_phase_and_knob(files, tmp_path, monkeypatch, capsys, phase):
    monkeypatch.setattr(*PLANTED[phase], fail)
    if phase == "ref":  # whose class the actor inherits from
        monkeypatch.setattr(
            Actor, "log_probs", lambda self, batch, *_, **options: (batch.rollout_log_probs,) * 2, raising=False
        )
    config = configured(files, tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        work(TRAINER, config)
    assert ended.value.code == 1
    line = last_line(capsys)
    where = f"out of memory in phase {phase} in this process (76.20 GiB of 79.10 GiB in use, 18.00 GiB asked for): "
    assert line.startswith(where), line
    assert MEMORY_KEYS.get(phase, "gpu_memory_utilization") in line and "TROUBLESHOOTING.md" in line
    if phase != "load":
        assert json.loads((tmp_path / "run/manifest.json").read_text())["status"] == "failed"


def test_another_error_keeps_its_traceback(files, tmp_path, monkeypatch):
    def wrong(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Actor, "update", wrong)
    with pytest.raises(RuntimeError, match="shapes differ"):
        work(TRAINER, configured(files, tmp_path / "run"))


def cpu_allocation():
    return torch.empty(2**58, dtype=torch.uint8)


def array():
    return np.empty(2**58, dtype=np.uint8)


@pytest.mark.parametrize("allocate", [cpu_allocation, array])
def test_a_real_failure_of_an_allocator_is_known_with_its_amount(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    found = out_of_memory(caught.value, "update_actor", "on learner rank 3")
    amount = r"268435456\.0 GiB|256\. PiB"
    assert re.fullmatch(
        rf"out of memory in phase update_actor on learner rank 3 \(({amount}) asked for\): lower .*", str(found)
    ), found
    assert "no amounts are known" in str(out_of_memory(MemoryError(), "gen"))
    assert out_of_memory(ValueError("memory"), "gen") is None and out_of_memory(found, "gen") is None


def test_what_a_phase_advises_are_keys():
    for text in MEMORY_KEYS.values():
        assert set(text.split(" or ")[:1]) <= set(convert.all_keys()), text


# -- over Ray


@pytest.fixture(scope="module")
def cluster():
    with local_ray(4):
        yield


def plant(actor, name: str) -> None:
    """Make a method of the actor's learner or engine fail there."""

    def replace(process):
        def fail_there(*_):
            raise torch.OutOfMemoryError(ON_A_GPU)

        async def fail_later(*_):
            fail_there()

        if hasattr(process, "engine"):
            process.engine.sample = fail_later
        else:
            setattr(process.learner, name, fail_there)

    ray.get(actor.__ray_call__.remote(replace))


AMOUNTS = r"\(76.20 GiB of 79.10 GiB in use, 18.00 GiB asked for\)"


@pytest.mark.slow  # 140 s, and Ray's tests share one process
@pytest.mark.xdist_group("ray")
def test_over_ray_the_process_is_named(cluster, tmp_path):
    config = cluster_config(write_model(tmp_path), "actor_rollout_ref.actor.use_kl_loss=False")
    workers = RayWorkers(config, tiny_tokenizer(), torch.device("cpu"), needs_ref=False, needs_critic=False)
    try:
        plant(workers.watch.actors["engine 0"], "sample")
        with pytest.raises(OutOfMemory, match=f"phase generate on engine 0 {AMOUNTS}"):
            asyncio.run(asyncio.wait_for(sample_of(workers), 60))
        plant(workers.learners[0], "weights")
        with pytest.raises(OutOfMemory, match=f"phase update_weights on learner rank 0 {AMOUNTS}"):
            workers.sync_weights(1)
    finally:
        workers.close()


async def sample_of(workers):
    return await workers.engine.sample(ask(seed=1))


class FullRank(RayPPOTrainer):
    """A run over Ray whose rank 1 has no memory for the update."""

    starts = 0

    def make_workers(self, device):
        FullRank.starts += 1
        workers = super().make_workers(device)
        plant(workers.learners[1], "update_actor")
        return workers


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_over_ray_ends_with_the_line_and_is_not_restarted(cluster, files, tmp_path, capsys):
    ranks = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "algorithm.adv_estimator=grpo")
    config = configured(files, tmp_path / "run", *ranks, "actor_rollout_ref.actor.use_kl_loss=False")
    with pytest.raises(SystemExit) as ended:
        work(f"{__name__}:FullRank", config)
    assert ended.value.code == 1 and FullRank.starts == 1
    line = last_line(capsys)
    assert re.match(f"out of memory in phase update_actor on learner rank 1 {AMOUNTS}: lower actor_rollout_ref", line)
