"""The kill harness on a toy run: what it must forgive, and what it must catch."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from core.checkpoint.run_state import save_tensors
from core.checkpoint.store import CheckpointStore
from tests.faults.kill_and_resume import (
    AtPoint,
    AtRandom,
    AtTime,
    RunFailed,
    compare_runs,
    run_uninterrupted,
    run_with_kills,
)
from tests.faults.killing import PHASES

# With two checkpoints kept and one every other step, pruning begins with the third
STEP_OF = {phase: 4 + index for index, phase in enumerate(("rollout", "update", "sync", "between"))}
STEP_OF |= {"checkpoint_write": 8, "checkpoint_rename": 8, "checkpoint_tracker": 10, "checkpoint_prune": 12}


def toy(bug: str | None = None, steps: int = 12):
    extra = ["--bug", bug] if bug else []
    return lambda folder: [sys.executable, "-m", "tests.faults.toy_run", str(folder), "--steps", str(steps), *extra]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return run_uninterrupted(toy(), tmp_path_factory.mktemp("toy") / "whole").folder


def test_every_named_moment_is_resumed_to_the_bit(whole, tmp_path):
    kills = [AtPoint(phase, step) for phase, step in STEP_OF.items()]
    assert {kill.phase for kill in kills} == set(PHASES) - {"remote_manifest"}  # of a run folder at a URL
    outcome = run_with_kills(toy(), tmp_path / "killed", kills, random.Random(0))
    assert outcome.landed == tuple(kills)
    assert compare_runs(whole, outcome.folder) == []
    assert sorted(path.name for path in outcome.folder.iterdir() if path.is_dir()) == [
        "global_step_10",
        "global_step_12",
    ]


def test_random_moments_are_resumed_to_the_bit(whole, tmp_path):
    kills = [AtTime(0.1), *[AtRandom(step_seconds=0.02)] * 5]
    outcome = run_with_kills(toy(), tmp_path / "killed", kills, random.Random(7))
    assert len(outcome.landed) >= 3
    assert compare_runs(whole, outcome.folder) == []


@pytest.mark.slow
def test_sixty_random_moments(tmp_path):
    command = toy(steps=150)
    reference = run_uninterrupted(command, tmp_path / "whole").folder
    outcome = run_with_kills(command, tmp_path / "killed", [AtRandom(step_seconds=0.02)] * 60, random.Random(3))
    assert len(outcome.landed) >= 40
    assert compare_runs(reference, outcome.folder) == []


@pytest.mark.parametrize(
    ("bug", "shows_in"),
    [
        ("rng", "actor/model.safetensors"),
        ("momentum", "actor/model.safetensors"),
        ("ordinal", "driver.pt"),
        ("counter", "metrics line"),
        ("metrics", "lines of metrics"),
    ],
)
def test_the_comparison_catches(bug, shows_in, whole, tmp_path):
    outcome = run_with_kills(toy(bug), tmp_path / "killed", [AtPoint("update", 8)], random.Random(0))
    assert any(shows_in in difference for difference in compare_runs(whole, outcome.folder))


def test_a_command_that_fails_by_itself_is_not_taken_for_killed(tmp_path):
    failing = lambda folder: [sys.executable, "-m", "no_such_module"]  # noqa: E731
    with pytest.raises(RunFailed, match="No module named no_such_module"):
        run_uninterrupted(failing, tmp_path / "run")
    with pytest.raises(RunFailed, match="exit status 1, expected -9"):
        run_with_kills(failing, tmp_path / "run", [AtPoint("update", 1)], random.Random(0))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_equal_tensors_in_unequal_files_are_equal(tmp_path):
    for name, value, protocol in (("a", 1.0, 2), ("b", 1.0, 3), ("c", 1.5, 2)):
        with CheckpointStore(tmp_path / name).writing(1) as folder:
            torch.save({"x": [torch.tensor([value])]}, folder / "o.pt", pickle_protocol=protocol)
    left, right = (CheckpointStore(tmp_path / name).latest().files["o.pt"]["sha256"] for name in "ab")
    assert left != right
    assert compare_runs(tmp_path / "a", tmp_path / "b") == []
    assert compare_runs(tmp_path / "a", tmp_path / "c") == ["o.pt: 1 of 1 values differ, such as /x/0"]


def test_a_run_without_its_last_checkpoint_is_not_equal(whole, tmp_path):
    with CheckpointStore(tmp_path).writing(10) as folder:
        save_tensors(folder / "o.pt", {"x": 1})
    assert "the last checkpoint is of step 12 there, 10 here" in compare_runs(whole, tmp_path)
    assert f"no checkpoint in {tmp_path / 'none'}" in compare_runs(whole, tmp_path / "none")
