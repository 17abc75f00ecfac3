"""Runs that share processes: one that fails, crashes or hoards takes no other one along, and leaves nothing behind."""

from __future__ import annotations

import os

from results.reporting.study_workers import Task, run_all

ENTRY = "tests.results.worker_run"


def ran(tmp_path, *arguments: str, jobs: int = 1, runs_each: float = float("inf")) -> dict:
    tasks = [(at, Task([argument], tmp_path / f"{at}.log")) for at, argument in enumerate(arguments)]
    return dict(run_all(tasks, ENTRY, jobs, [], runs_each))


def test_runs_share_a_process_and_their_output_is_apart(tmp_path):
    ended = ran(tmp_path, "pid", "pid", "pid")
    logs = [(tmp_path / f"{at}.log").read_text() for at in range(3)]
    assert [one.status for one in ended.values()] == [0, 0, 0]
    assert len(set(logs)) == 1 and int(logs[0]) != os.getpid()


def test_a_process_is_replaced_after_its_runs(tmp_path):
    ran(tmp_path, "pid", "pid", "pid", "pid", runs_each=2)
    logs = [(tmp_path / f"{at}.log").read_text() for at in range(4)]
    assert logs[0] == logs[1] != logs[2] == logs[3]


def test_a_run_that_fails_or_crashes_ends_alone(tmp_path):
    ended = ran(tmp_path, "raise", "exit", "message", "crash", "kill", "pid", jobs=2)
    assert {at: one.status for at, one in ended.items()} == {0: 1, 1: 3, 2: 1, 3: 7, 4: -9, 5: 0}
    assert "ZeroDivisionError" in (tmp_path / "0.log").read_text() and "why" in (tmp_path / "2.log").read_text()


def test_what_a_run_held_is_gone_after_it(tmp_path):
    ended = ran(tmp_path, *["hold"] * 6)  # 64 MB each, in a circle
    assert ended[5].resident_mb - ended[0].resident_mb < 32
    leaking = ran(tmp_path, *["leak"] * 4)  # the measure sees what stays
    assert leaking[3].resident_mb - leaking[0].resident_mb > 128


def test_the_time_of_a_run_is_its_own(tmp_path):
    ended = ran(tmp_path, "spin", "pid")
    assert 0.2 < ended[0].cpu_s < 5 and ended[1].cpu_s < 0.2 and ended[0].seconds > 0.2
