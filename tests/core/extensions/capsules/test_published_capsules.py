"""The published capsules: each repeats, and bugs that are planted in a phase show as the first tensor that differs."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import core.learner.batching
import core.learner.learner
import core.ray_trainer
from core.algorithm import invariants
from core.algorithm.advantages import AdvantageInputs
from core.extensions.capsules import differences, phases
from core.extensions.capsules.replay_report import replay
from core.extensions.capsules.stored_step import read
from core.learner.learner import Actor, Stepper

CAPSULES = Path(__file__).resolve().parents[4] / "results/capsules"
PUBLISHED = sorted(CAPSULES.glob("*/step_*"))
MB = 2**20


@pytest.fixture(autouse=True)
def threads():
    """Replaying sets torch's threads to the recorded number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def capsule(recipe: str) -> Path:
    (folder,) = (path for path in PUBLISHED if path.parent.name == recipe)
    return folder


def test_each_recipe_has_one_of_at_most_5_mb():
    assert [path.parent.name for path in PUBLISHED] == ["dapo", "grpo", "ppo", "search_r1"]
    for path in PUBLISHED:
        files = [file for file in path.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= 5 * MB
        assert {file.suffix for file in files} <= {".json", ".safetensors"}, "nothing that is pickled"


def test_nothing_of_the_machine_is_published():
    for path in PUBLISHED:
        text = (path / "capsule.json").read_text()
        assert not re.findall(r'"/[^"]*"', text), "an absolute path"
        assert read(path).facts["code"]["dirty"] is False, "nobody else has the code that made it"


@pytest.mark.parametrize("recipe", ["dapo", "grpo", "ppo", "search_r1"])
def test_a_published_step_repeats(recipe):
    done = replay(CAPSULES / recipe)
    assert not done.found, done
    assert str(done.rule).startswith("to the bit (as recorded" if done.rule.exact else "to 1e-05 (")


def test_another_machine_is_told_and_has_a_tolerance(monkeypatch):
    monkeypatch.setattr(differences, "cpu_kind", lambda: "another CPU")
    found = read(capsule("grpo"))
    rule = differences.Closeness.of(found)
    assert not rule.exact and "is another CPU" in str(rule)
    exact = dataclasses.replace(rule, exact=True)
    one, other = torch.tensor([1.0, 1000.0]), torch.tensor([1.0 + 5e-6, 1000.005])
    assert not differences.differing(one, other, rule).any() and differences.differing(one, other, exact).all()
    assert differences.differing(one, one + torch.tensor([2e-5, 0]), rule).tolist() == [True, False]


# --- planted bugs ---


def test_several_threads_have_a_tolerance():
    found = read(capsule("grpo"))
    machine = {**found.facts["machine"], "threads": 2}
    rule = differences.Closeness.of(dataclasses.replace(found, facts={**found.facts, "machine": machine}))
    assert not rule.exact and "2 threads need not add up in the same order" in str(rule)


def wrapped(monkeypatch, owner, name, change):
    """Let ``change(original, *args)`` stand in for a function."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def shifted_mask(patch):
    def change(make, *args):
        batch = make(*args)
        return batch.adding(response_mask=batch.response_mask.roll(1))

    wrapped(patch, phases, "make_batch", change)


def tools_are_trained_on(patch):
    wrapped(patch, phases, "make_batch", lambda make, groups, pad, masking: make(groups, pad, False))


def labels_one_off(patch):
    def change(read, hidden, weight, labels, **options):
        return read(hidden, weight, labels.roll(1), **options)

    wrapped(patch, core.learner.learner, "token_log_probs_and_entropy", change)


def other_temperature(patch):
    def change(read, *args, temperature, **options):
        return read(*args, temperature=1.01 * temperature, **options)

    wrapped(patch, core.learner.learner, "token_log_probs_and_entropy", change)


def no_division_by_std(patch):
    def change(inputs_of, batch, config, *rest):
        return inputs_of(batch, config.replace(norm_adv_by_std_in_grpo=False), *rest)

    wrapped(patch, core.ray_trainer.advantages, "inputs_of", change)


def no_whitening(patch):
    patch.setattr("core.algorithm.advantages.masked_whiten", lambda values, mask: values)


def reward_a_token_early(patch):
    wrapped(patch, AdvantageInputs, "action_rewards", lambda rewards, inputs: rewards(inputs).roll(-1))


def scaled_by_the_micro_batch(patch):
    wrapped(patch, Actor, "micro_batch_loss", lambda loss, self, micro, means: loss(self, micro, means) / len(micro))


def loss_by_micro_batch(patch):
    """The loss is a mean over the micro-batch's tokens, as without a sum over the optimizer step."""

    def change(loss, self, micro, means):
        weight = micro.response_mask / micro.response_mask.sum()
        return loss(self, micro.adding(loss_weight=weight), means)

    wrapped(patch, Actor, "micro_batch_loss", change)


def other_loss(patch, change):
    def chosen(original, mode):
        loss = original(mode)
        return lambda *args, **more: change(functools.partial(loss, **more), *args)

    wrapped(patch, core.learner.learner, "policy_loss", chosen)


def symmetric_clip(patch):
    def change(loss, log_prob, old, adv, mask, config):
        return loss(log_prob, old, adv, mask, config.replace(clip_ratio_low=0.1, clip_ratio_high=0.1))

    other_loss(patch, change)


def ratio_to_itself(patch):
    other_loss(patch, lambda loss, log_prob, old, *rest: loss(log_prob, log_prob.detach(), *rest))


def negative_advantage(patch):
    other_loss(patch, lambda loss, log_prob, old, adv, *rest: loss(log_prob, old, -adv, *rest))


def sequence_mean(patch):
    wrapped(
        patch,
        core.learner.batching,
        "loss_weights",
        lambda weights, mask, lengths, mode, **rest: weights(mask, lengths, "seq-mean-token-mean", **rest),
    )


def other_kl(patch):
    wrapped(patch, core.learner.learner, "kl_penalty", lambda kl, one, ref, kind, mask: kl(one, ref, "mse", mask))


def gradients_stay(patch):
    def change(step, self, rate):
        self.optimizer.zero_grad = lambda set_to_none=True: None
        return step(self, rate)

    wrapped(patch, Stepper, "step", change)


def unclipped_values(patch):
    def change(loss, values, returns, old, clip, mask):
        return loss(values, returns, old, 1e6, mask)

    wrapped(patch, core.learner.learner, "value_loss", change)


def rate_of_the_step_before(patch):
    wrapped(patch, core.ray_trainer, "multiplier", lambda rate, config, step, total: 0.5 * rate(config, step, total))


BUGS = [  # recipe, bug, phase and tensor that are named first
    ("grpo", shifted_mask, "batch: response_mask at token "),
    ("search_r1", tools_are_trained_on, "batch: response_mask at token "),
    ("grpo", labels_one_off, "log_probs: old_log_probs at token "),
    ("ppo", other_temperature, "log_probs: old_log_probs at token "),
    ("grpo", no_division_by_std, "advantages: advantages at token "),
    ("ppo", no_whitening, "advantages: advantages at token "),
    ("ppo", reward_a_token_early, "advantages: advantages at token "),
    ("dapo", sequence_mean, "update: actor/loss_weight at the policy's token "),
    ("grpo", scaled_by_the_micro_batch, "update: actor/gradient norm of optimizer step 0"),
    ("grpo", loss_by_micro_batch, "update: actor/loss_weight at the policy's token "),
    ("dapo", symmetric_clip, "update: actor/gradient norm of optimizer step 1"),
    ("grpo", ratio_to_itself, "update: actor/loss at the policy's token "),
    ("dapo", negative_advantage, "update: actor/loss at the policy's token "),
    ("search_r1", other_kl, "update: actor/gradient norm of optimizer step 1"),
    ("grpo", gradients_stay, "update: actor/gradient norm of optimizer step 1"),
    ("ppo", unclipped_values, "update: critic/gradient norm of optimizer step "),
    ("grpo", rate_of_the_step_before, "update: actor/lr was "),
]

LATER = {ratio_to_itself: "update: actor/gradient norm of optimizer step 1"}


@pytest.mark.parametrize("recipe, bug, named", BUGS, ids=[bug.__name__ for _, bug, _ in BUGS])
def test_a_planted_bug_is_named(recipe, bug, named, monkeypatch):
    monkeypatch.setattr(invariants, "require", lambda *_: None)  # which ends such a step before it can be compared
    bug(monkeypatch)
    phase = named.partition(":")[0]
    done = replay(CAPSULES / recipe, phases=phases.PHASES[: phases.PHASES.index(phase) + 1])
    # Where the replay is compared to 1e-5, the last bits of the first losses are the same, and the next step is named.
    names = (named, LATER[bug]) if bug in LATER and not done.rule.exact else (named,)
    assert done.found and str(done.found[0]).startswith(names), done


@pytest.mark.slow
@pytest.mark.parametrize("recipe, bug, named", BUGS, ids=[bug.__name__ for _, bug, _ in BUGS])
def test_the_tolerance_hides_no_planted_bug(recipe, bug, named, monkeypatch):
    monkeypatch.setattr(differences, "cpu_kind", lambda: "another CPU")
    assert not replay(CAPSULES / recipe).found
    monkeypatch.setattr(invariants, "require", lambda *_: None)
    bug(monkeypatch)
    done = replay(CAPSULES / recipe)
    assert not done.rule.exact and done.found and done.found[0].phase == named.partition(":")[0], done


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dapo", "grpo", "ppo", "search_r1"])
def test_another_kind_of_cpu_repeats_to_the_tolerance(recipe):
    """Torch is told to use none of the CPU's vector instructions, and then rounds otherwise."""
    command = [sys.executable, "-m", "core.replay", str(CAPSULES / recipe)]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, cwd=CAPSULES.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "rule: to 1e-05 (CPU was " in done.stdout, done.stdout + done.stderr
