"""A run over Ray whose processes are killed: started again from its checkpoint, it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.kill_and_resume import compare_runs, launched, read_lines, run_uninterrupted
from tests.faults.tiny_run import command, prepare

STEPS = 6
RAY = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.max_restarts=1")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare(folder)
    return folder


def processes() -> dict[int, tuple[int, str, str]]:
    """pid -> (parent, when it started, its title), zombies left out."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError):  # not a process, or one that just ended
            continue
        if state != "Z":
            found[int(folder.name)] = (int(parent), rest[17], title)
    return found


def family(pid: int) -> dict[tuple[int, str], str]:
    """(pid, start) -> title of the process and of all that it started, directly or not."""
    alive, found, todo = processes(), {}, [pid]
    while todo:
        one = todo.pop()
        if one in alive:
            found[one, alive[one][1]] = alive[one][2]
        todo += [child for child, (parent, _, _) in alive.items() if parent == one]
    return found


def follow(process: subprocess.Popen, run: Path, step: int, act: Callable[[dict], None]) -> Iterator[tuple[int, str]]:
    """Acts on the family once ``step`` is logged, waits for the end; yields every process that there ever was."""
    seen, acted, deadline = {}, False, time.monotonic() + 240
    while process.poll() is None:
        assert time.monotonic() < deadline, "the run neither ended nor went on"
        now = family(process.pid)
        seen |= now
        if not acted and len(read_lines(run / "metrics.jsonl")) > step:  # step 0 is a validation
            acted = True
            act(now)
        time.sleep(0.2)
    assert acted
    yield from seen


def left_after(seen: list[tuple[int, str]], seconds: float) -> list[tuple[int, str]]:
    """Those still there when the time is up, or none."""
    deadline = time.monotonic() + seconds
    while True:
        alive = {(pid, start) for pid, (_, start, _) in processes().items()}
        left = [one for one in seen if one in alive]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def killing(title: str) -> Callable[[dict], None]:
    def act(now: dict[tuple[int, str], str]) -> None:
        victims = [pid for (pid, _), name in now.items() if name.startswith(f"ray::{title}")]
        os.kill(victims[-1], signal.SIGKILL)

    return act


def disturbed(files: Path, name: str, act: Callable[[dict], None], *overrides: str) -> tuple[int, Path, str, list]:
    """Status, folder and log of a run in which ``act`` happened in the fourth step, and all its processes."""
    run = files / name
    with launched(command(files, "ppo", STEPS, *RAY, *overrides)(run), run) as process:
        seen = list(follow(process, run, 3, act))
    return process.returncode, run, run.with_name(f"{name}.log").read_text(), seen


def steps(run: Path) -> list[dict[str, float]]:
    """The metrics of every step, each of which is there once."""
    lines = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    return lines[1:]


def differences(one: Path, other: Path) -> list[str]:
    """Of torch's sharded checkpoints all but the index, in which it writes an id of its own."""
    return [line for line in compare_runs(one, other) if ".metadata" not in line]


def test_a_killed_learner_costs_a_restart_and_the_run_goes_to_its_end(files):
    """Two ranks, one of them killed after step 3 of 6. The first step is that of a run in one process without Ray,
    but for a token here or there: other threads round otherwise, and sampling turns that into another token. Equality
    on the same tokens is tested in test_fsdp.py."""
    status, run, log, seen = disturbed(files, "learner", killing("LearnerProcess"))
    assert status == 0, log
    assert "died in phase" in log and "restart 1 of 1, after step 2" in log
    assert left_after(seen, 30) == []
    alone = run_uninterrupted(command(files, "ppo", STEPS), files / "alone").folder
    names = ("critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss")
    found, expected = ({name: of[name] for name in names} for of in (steps(run)[0], steps(alone)[0]))
    assert found == pytest.approx(expected, rel=0.05)


@pytest.fixture(scope="module")
def whole(files) -> Path:
    return run_uninterrupted(command(files, "ppo", STEPS, *RAY), files / "whole").folder


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["LearnerProcess", "EngineProcess"])
def test_a_restarted_run_is_the_undisturbed_one_to_the_bit(files, whole, victim):
    status, run, log, seen = disturbed(files, f"killed-{victim}", killing(victim))
    assert status == 0 and "restart 1 of 1" in log, log
    assert differences(whole, run) == []
    assert left_after(seen, 90) == []


@pytest.mark.slow
def test_without_restarts_a_death_is_one_clear_line(files):
    start = []

    def act(now):
        killing("EngineProcess")(now)
        start.append(time.monotonic())

    status, _, log, seen = disturbed(files, "given-up", act, "trainer.max_restarts=0")
    assert time.monotonic() - start[0] < 120
    assert status == 1 and "engine 0 died in phase" in log and "Traceback" not in log
    assert left_after(seen, 90) == []


@pytest.mark.slow
def test_ctrl_c_at_the_whole_group_saves_and_resumes(files, whole):
    """A terminal sends SIGINT to every process of the run, not only to the driver."""

    def interrupt(now):
        for pid, _ in now:
            os.kill(pid, signal.SIGINT)

    status, run, log, seen = disturbed(files, "interrupted", interrupt)
    assert status == 0 and "stopped after step" in log, log
    assert left_after(seen, 90) == []
    run_uninterrupted(command(files, "ppo", STEPS, *RAY), run)
    assert differences(whole, run) == []


@pytest.mark.slow
def test_a_killed_driver_takes_everything_with_it(files):
    def act(now):
        driver = min(now, key=lambda one: int(one[1]))
        os.kill(driver[0], signal.SIGKILL)

    status, _, _, seen = disturbed(files, "driver", act)
    assert status == -signal.SIGKILL
    assert left_after(seen, 90) == []
