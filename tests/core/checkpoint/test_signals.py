"""Ctrl-C: the first one finishes the step, the second one ends the process, with real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.checkpoint.store import CheckpointStore
from core.cluster.ray_pools import kept_from_children
from core.graceful_stop import GracefulStop
from tests.forked import Forked


def loop(folder: Path, seconds: float) -> None:
    """Take steps until a signal comes, then save."""
    store, step = CheckpointStore(folder), 0
    try:
        with GracefulStop() as stop:
            while not stop.requested:
                step += 1
                print(f"step {step} begins")
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(0.01)
                print(f"step {step} ends")
            with store.writing(step) as folder:
                (folder / "x").write_text(str(step))
    finally:
        print("cleaned up")


def start(folder: Path, seconds: float) -> Forked:
    process = Forked(loop, folder, seconds)
    assert process.stdout.readline() == "step 1 begins\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_the_first_signal_finishes_the_step_and_saves(number, tmp_path):
    process = start(tmp_path, 0.3)
    process.send_signal(number)
    done = process.end()
    assert done.returncode == 0
    assert done.stdout == "step 1 ends\ncleaned up\n"
    assert f"{number.name}: finishing this step" in done.stderr
    assert "Traceback" not in done.stderr and "the same command continues" in done.stderr
    assert (tmp_path / "global_step_1" / "x").read_text() == "1"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_stops_at_once(number, status, tmp_path):
    process = start(tmp_path, 60)
    process.send_signal(signal.SIGINT)
    assert "finishing this step" in process.stderr.readline() + process.stderr.readline()
    before = time.monotonic()
    process.send_signal(number)
    done = process.end()
    assert time.monotonic() - before < 5
    assert done.returncode == status and done.stdout == ""
    assert f"{number.name} again: stopping at once" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "global_step_1").exists()


def test_what_a_group_is_sent_does_not_reach_children_that_the_step_needs():
    """A terminal that closes signals every process of the group, Ray's too."""
    with kept_from_children():
        child = subprocess.Popen(
            [sys.executable, "-c", "print('there', flush=True); input()"], stdin=-1, stdout=-1
        )
    assert child.stdout.readline() == b"there\n"
    for number in (signal.SIGHUP, signal.SIGUSR1):
        child.send_signal(number)
    child.communicate(b"end\n", timeout=30)
    assert child.returncode == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGHUP, signal.SIGUSR1}


def test_a_forked_worker_dies_of_terminate_and_outlives_ctrl_c():
    with GracefulStop() as stop:
        told, tells = os.pipe()
        if (child := os.fork()) == 0:
            os.write(tells, b"x")
            time.sleep(60)
            os._exit(7)
        os.read(told, 1)
        os.kill(child, signal.SIGINT)  # handled first, if both are pending
        os.kill(child, signal.SIGTERM)
        assert (
            os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
            and not stop.requested
        )


def test_a_schedulers_signal_that_is_passed_on_counts_once():
    """slurmstepd signals every process, and srun and shells pass on what they get: the run must
    still save."""
    if (child := os.fork()) == 0:
        with GracefulStop() as stop:
            for number in (signal.SIGUSR1, signal.SIGUSR1):
                signal.raise_signal(number)
            os._exit(5 if stop.requested else 6)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
