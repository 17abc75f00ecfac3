"""A run of the real trainer, killed anywhere and resumed, ends as if nothing had happened: to the
bit."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import flip_bit
from tests.faults.kill_and_resume import (
    AtPoint,
    AtRandom,
    compare_runs,
    launched,
    read_lines,
    run_uninterrupted,
    run_with_kills,
)
from tests.faults.killing import PHASES
from tests.faults.tiny_run import command, prepare
from tests.forked import forked_command

STEPS = 6
# A checkpoint every other step, two kept: what is written at 6 is the first to have something to
# prune
POINTS = {
    "rollout": 2,
    "update": 3,
    "sync": 4,
    "between": 5,
    "checkpoint_write": 4,
    "checkpoint_rename": 4,
}
POINTS |= {"checkpoint_tracker": 4, "checkpoint_prune": 6}
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=low_var_kl")
TAUGHT = (
    "distillation.reward_weight=1",
    "distillation.teacher.path=${actor_rollout_ref.model.path}",
)
STALE = ("trainer.max_staleness=2", "algorithm.rollout_correction.rollout_is=sequence")
ADAPTIVE = (
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
)


@pytest.fixture(scope="module")
def grpo(files) -> tuple[Callable, Path]:
    """The command, and the folder of an undisturbed run of it."""
    factory = command(files, "grpo", STEPS, *KL)
    done = forked_command(factory(files / "whole"))
    assert done.returncode == 0, done.stderr
    return factory, files / "whole"


@pytest.mark.processes
def test_ctrl_c_kills_and_a_damaged_checkpoint_leave_no_trace(files):
    factory = command(files, "grpo", STEPS, *KL)
    whole = run_uninterrupted(factory, files / "undisturbed").folder
    run, log = files / "interrupted", files / "interrupted.log"
    with launched(factory(run), run) as process:
        # Step 0 is a validation
        while process.poll() is None and len(read_lines(run / "metrics.jsonl")) < 2:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 0, log.read_text()
    stopped_at = int(json.loads(read_lines(run / "metrics.jsonl")[-1])["step"])
    assert 1 <= stopped_at < 3, "stopped within a step of the signal"
    moments = (
        ("rollout", 3),
        ("sync", 4),
        ("checkpoint_tracker", 4),
        ("checkpoint_write", 6),
        ("checkpoint_rename", 6),
    )
    kills = tuple(AtPoint(phase, step) for phase, step in moments)
    assert run_with_kills(factory, run, kills, random.Random(0), finish=False).landed == kills
    flip_bit(run / "global_step_4" / "actor" / "model.safetensors")
    run_uninterrupted(factory, run)
    told = log.read_text()
    assert (
        f"stopped after step {stopped_at} of {STEPS}" in told
        and (f"resumed after step {stopped_at} ") in told
    )
    assert (
        "with changes" not in told and "global_step_4: actor/model.safetensors was altered" in told
    )
    assert compare_runs(whole, run) == []
    metrics = [json.loads(line) for line in read_lines(whole / "metrics.jsonl")]
    assert metrics[-1]["actor/grad_norm"] > 0, (
        "a run in which nothing happens would resume well, too"
    )


def test_a_finished_run_says_so_and_changes_nothing(grpo):
    factory, whole = grpo
    before = {
        path: path.read_bytes()
        for path in whole.rglob("*")
        if path.is_file() and "global_step" in str(path)
    }
    metrics = read_lines(whole / "metrics.jsonl")
    command = [*factory(whole), "trainer.total_epochs=40"]
    done = forked_command(command)
    assert done.returncode == 0 and "finished" in done.stdout, done.stderr
    assert "with changes, so not to the bit: " in done.stderr
    assert [
        line.count(" was ")
        for line in done.stderr.splitlines()
        if "total_epochs was 30, is 40" in line
    ] == [1]
    assert read_lines(whole / "metrics.jsonl") == metrics
    assert {path: path.read_bytes() for path in before} == before


def test_a_checkpoint_of_another_model_is_refused(grpo, files, tmp_path):
    factory, whole = grpo
    other = tmp_path / "other"
    other.mkdir()
    prepare(other, hidden_size=32)
    model = "actor_rollout_ref.model.path="
    arguments = [
        f"{model}{other / 'model'}" if text.startswith(model) else text for text in factory(whole)
    ]
    done = forked_command(arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "actor_rollout_ref.model.path was " in done.stderr
    arguments.append("trainer.resume_with_changes=True")
    done = forked_command(arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "holds weights of another model" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("grpo", KL), ("ppo", ADAPTIVE), ("grpo", STALE), ("opd", TAUGHT)],
)
def test_every_named_moment(recipe, overrides, files, tmp_path):
    factory = command(files, recipe, STEPS, *overrides)
    whole = run_uninterrupted(factory, tmp_path / "whole").folder
    assert POINTS.keys() == PHASES.keys() - {"remote_manifest"}
    kills = sorted(
        (AtPoint(phase, step) for phase, step in POINTS.items()), key=lambda kill: kill.step
    )
    outcome = run_with_kills(factory, tmp_path / "killed", kills, random.Random(0))
    assert outcome.landed == tuple(kills)
    assert compare_runs(whole, outcome.folder) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_five_random_moments(files, tmp_path):
    # Long enough for 60 kills at the pace seen: 16 landed in 40 steps
    factory = command(files, "grpo", 160, *KL)
    whole = run_uninterrupted(factory, tmp_path / "whole").folder
    kills = [AtRandom(step_seconds=0.3)] * 25
    outcome = run_with_kills(factory, tmp_path / "killed", kills, random.Random(5))
    assert len(outcome.landed) >= 20
    assert compare_runs(whole, outcome.folder) == []
