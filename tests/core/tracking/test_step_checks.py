"""The checks that a run's recorders begin with: in whole runs, each at its moment, and silent in a sound run."""

from __future__ import annotations

import pytest

from core.errors import BrokenInvariant
from core.ray_trainer import RayPPOTrainer
from tests.core.scripted_run import configured, prepare, scripted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("checks"))


def fit(folder, name, *overrides, base=RayPPOTrainer, report=lambda step: {}, steps=2):
    config = configured(folder, name, *overrides, steps=steps)
    run = scripted(base)(config, lambda request, version: str(request.seed % 5), report=report).init_workers()
    run.fit()
    return run


class RewardsMoved(RayPPOTrainer):
    """Rewards change between two phases, and the hook for advantages is the recipe's own."""

    def apply_rollout_correction(self, batch, metrics):
        return batch.adding(reward=batch.reward + 1)

    def compute_advantages(self, batch, metrics):
        zeros = batch.rollout_log_probs * 0
        return batch.adding(advantages=zeros, returns=zeros)


def test_what_advantages_are_made_of_is_what_was_set_whatever_the_hook_is(folder):
    with pytest.raises(BrokenInvariant, match="phase adv: reward of row 0 is not what was set"):
        fit(folder, "moved", base=RewardsMoved)


class Repeating(RayPPOTrainer):
    """The second step gets the groups of the first."""

    def collect(self, metrics):
        if metrics.step == 2:
            return self.first
        self.first = super().collect(metrics)
        return self.first


def test_a_group_trains_once(folder):
    with pytest.raises(BrokenInvariant, match="begins with example 0, and those below 4 are trained"):
        fit(folder, "twice", base=Repeating)


@pytest.mark.parametrize(
    ("used", "overrides", "said"),
    [
        (0.0, (), "the schedule gives step 1 a learning rate of 0"),
        (1e-6, ("actor_rollout_ref.actor.optim.lr_warmup_steps=2",), "the schedule gives step 1 5e-07"),
    ],
)
def test_the_rate_of_an_update_is_that_of_its_schedule(folder, used, overrides, said):
    rate = ("actor_rollout_ref.actor.optim.lr=1e-6", *overrides)
    with pytest.raises(BrokenInvariant, match=said):
        fit(folder, f"rate-{used}", *rate, report=lambda step: {"actor/lr": used})


def test_a_sound_run_passes_and_turns_are_forgotten(folder):
    run = fit(folder, "sound", report=lambda step: {"actor/lr": 1e-6}, steps=3)
    checks = run.recorders.each[0]
    assert run.session.step == 3 and checks.trained == 12
    assert all(turns[-1][1].policy_version >= 3 for turns in checks.turns.turns.values())
