"""A real run whose scheduler warns and whose disk is full."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from core.checkpoint.store import CheckpointStore
from tests.checkpoints import ROOT
from tests.faults.kill_and_resume import compare_checkpoints, read_lines, run_uninterrupted
from tests.faults.tiny_run import command
from tests.forked import forked, run_module

STEPS = 6
SLOWLY = (
    "custom_reward_function.name=slowly",
    "trainer.save_freq=100",
    "reward_model.reward_manager=prime",
)


@contextmanager
def started(arguments: list[str], **streams):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_step(process: subprocess.Popen, run: Path, step: int) -> None:
    while process.poll() is None and (
        not (lines := read_lines(run / "metrics.jsonl")) or _last(lines) < step
    ):
        time.sleep(0.01)
    assert process.poll() is None


def _last(lines: list[str]) -> int:
    return int(json.loads(lines[-1])["step"])


def status(run: Path) -> str:
    return json.loads((run / "manifest.json").read_text())["status"]


@pytest.mark.processes
def test_two_warnings_and_a_damaged_line_leave_no_trace_in_the_weights(files, tmp_path):
    factory, run = command(files, "grpo", STEPS, *SLOWLY), tmp_path / "run"
    with started(factory(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until_step(process, run, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
    first = CheckpointStore(run).latest().step
    assert 1 <= first < STEPS and status(run) == "stopped"

    with started(factory(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until_step(process, run, first + 1)
        os.killpg(process.pid, signal.SIGUSR1)  # as SLURM does: all processes of the group
        assert process.wait(200) == 0
    second = CheckpointStore(run).latest().step
    assert first < second < STEPS and status(run) == "stopped"

    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff" + lines[1][:30], *lines[2:]]))
    run_uninterrupted(factory, run)
    assert status(run) == "finished"
    assert [int(json.loads(line)["step"]) for line in read_lines(run / "metrics.jsonl")] == [
        0,
        2,
        3,
        4,
        5,
        6,
    ]
    rates = [
        json.loads(line)["reward/crash_rate"] for line in read_lines(run / "metrics.jsonl")[1:]
    ]
    assert rates == [0.0] * (STEPS - 1), "graders outlive what their group is sent"
    whole = run_uninterrupted(command(files, "grpo", STEPS, *SLOWLY), tmp_path / "whole").folder
    assert list(compare_checkpoints(whole, run)) == []


def test_a_full_disk_ends_in_one_line_with_1_and_the_status_failed(files, tmp_path):
    """No file may grow beyond 20 kB: records can be written, weights cannot."""
    run = tmp_path / "run"

    def limited(command: list[str]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        run_module(command)

    options = (
        "trainer.save_freq=1",
        "trainer.logger=[console]",
        f"trainer.rollout_data_dir={tmp_path / 'answers'}",
    )
    arguments = command(files, "grpo", 2, *options)(run)
    done = forked(limited, arguments)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "the checkpoint of step 2 could not be written" in last and str(run) in last, done.stderr
    assert "File too large" in last and "GiB free" in last and "Make room" in last
    assert "Traceback" not in done.stderr
    assert "Training goes on" in done.stderr, "after step 1"
    assert status(run) == "failed" and len(read_lines(run / "metrics.jsonl")) == 3
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["validation"]
