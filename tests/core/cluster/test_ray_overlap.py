"""One step off-policy over Ray: an engine in a pool of its own works while the learner updates, and
nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from core.command_line import train
from core.config.composition import compose
from core.config.schema import Config
from recipes.dapo.dapo_ray_trainer import RayDAPOTrainer
from tests.core.ray_cluster import local_ray
from tests.faults.tiny_run import command, prepare

pytestmark = pytest.mark.xdist_group("ray")  # one Ray, however many test processes

STEPS, P = 5, 4
APART = (
    "trainer.backend=ray",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)
STALE = ("trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=token")
# Groups whose answers are all of one parity are dropped: which are trained depends on every policy
# before
FILTERED = (
    "custom_reward_function.name=parity",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=score",
    "reward_model.overlong_buffer.enable=False",
    # So few in flight that a step hardly has all of the next one's groups in hand
    "data.gen_batch_size=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=1",
)


class Trainer(RayDAPOTrainer):
    """Keeps what each step trained on."""

    kill_in = 0  # the step whose update ends with a kill -9 of the learner, once

    def init_workers(self):
        super().init_workers()
        self.trained: dict[int, list[tuple[int, int]]] = {}
        return self

    async def generate(self, prompt, *args):
        ahead = self.collected is not None and prompt.ordinal in self.collected.ahead_window
        if ahead and type(self).kill_in == self.run.step + 1:
            type(self).kill_in = 0
            learner = self.workers.watch.actors["learner rank 0"]
            os.kill(ray.get(learner.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        return await super().generate(prompt, *args)

    def complete_step(self, groups_P, batch, metrics):
        self.trained[metrics.step] = [
            (g.prompt.ordinal, *{t.policy_version for t in g.trajectories}) for g in groups_P
        ]
        super().complete_step(groups_P, batch, metrics)


@dataclass(frozen=True)
class Fitted:
    folder: Path
    tries: list[Trainer]

    @property
    def trained(self) -> dict[int, list[tuple[int, int]]]:
        return {step: groups for one in self.tries for step, groups in one.trained.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    prepare(folder)
    with local_ray(4):
        yield folder


def fit(files: Path, name: str, *overrides: str) -> Fitted:
    arguments = command(files, "dapo", STEPS, *STALE, *FILTERED, *overrides)(files / name)[3:]
    tries: list[Trainer] = []

    def begun(config: Config) -> Trainer:
        tries.append(Trainer(config))
        return tries[-1]

    train(begun, compose("dapo", arguments))
    return Fitted(files / name, tries)


@pytest.fixture(scope="module")
def apart(files) -> Fitted:
    return fit(files, "apart", *APART)


@pytest.mark.slow
def test_the_steps_are_those_of_a_run_in_one_process(files, apart):
    """The same ordinals, of the same policies: the ones drawn ahead are one older, and no sample is
    older than that."""
    lines = [json.loads(line) for line in (apart.folder / "metrics.jsonl").read_text().splitlines()]
    assert ["timing_s/hidden_ahead" in line for line in lines] == [True] * (STEPS - 1) + [False]
    assert max(line["rollout_corr/probe_diff"] for line in lines) < 1e-4
    alone = fit(files, "alone")
    assert apart.trained == alone.trained
    ages = [{step - 1 - version for _, version in groups} for step, groups in apart.trained.items()]
    assert ages[0] == {0} and set().union(*ages) == {0, 1} and all(1 in age for age in ages[1:])
    ordinals = [ordinal for groups in apart.trained.values() for ordinal, _ in groups]
    assert len(ordinals) == STEPS * P < ordinals[-1] + 1  # some were dropped


@pytest.mark.slow
def test_samples_two_policies_old_are_those_of_a_run_in_one_process(files):
    two = "trainer.max_staleness=2"
    apart, alone = fit(files, "two_apart", *APART, two), fit(files, "two_alone", two)
    assert apart.trained == alone.trained
    ages = [{step - 1 - version for _, version in groups} for step, groups in apart.trained.items()]
    # Where many groups are dropped, a window may end before the step it was meant for
    oldest = [max(age) for age in ages]
    assert oldest[:3] == [0, 1, 2] and max(oldest) == 2


@pytest.mark.slow
def test_a_learner_killed_under_the_overlap_costs_no_ordinal(files, apart, monkeypatch):
    monkeypatch.setattr(Trainer, "kill_in", 3)
    killed = fit(files, "killed", *APART, "trainer.max_restarts=1")
    first, second = killed.tries
    # After step 2, or after 1 where that checkpoint was still being written
    resumed = STEPS - len(second.trained)
    assert list(first.trained) == [1, 2] and resumed in (1, 2)
    assert list(second.trained) == list(range(resumed + 1, STEPS + 1))
    assert killed.trained == apart.trained
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncio")]


@pytest.mark.processes
def test_a_function_that_uses_an_alarm_grades_the_answers_ahead_too(files):
    alarm = ("custom_reward_function.name=with_an_alarm", "algorithm.filter_groups.enable=False")
    run = fit(files, "alarm", *APART, *alarm, "trainer.total_training_steps=3")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert ["timing_s/hidden_ahead" in line for line in lines] == [True, True, False]
    assert [line.get("reward/failed_rate", 0.0) for line in lines] == [0.0] * 3
    assert all(line["critic/score/mean"] > 0 for line in lines)
