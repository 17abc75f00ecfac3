"""What the tests of the grading pool share: jobs, and a count of processes."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

from core.rewards.graders import GraderPool, InProcess
from core.rewards.grading import Failure, Job
from reward_scores.score import Score

UNRULY = str(Path(__file__).parent / "unruly_reward.py")
MARK = "REWARD_POOL_TEST"


def job(response: str, ground_truth: object = "right", **extra_info: object) -> Job:
    return Job("tests/unruly", response, ground_truth, extra_info)


def grade(manager: GraderPool | InProcess, jobs: list[Job]) -> list[Score | Failure]:
    async def everything() -> list[Score | Failure]:
        return await asyncio.gather(*map(manager.run, jobs))

    return asyncio.run(everything())


@contextmanager
def marked():
    """Yields a function that lists the processes started since, this one excepted, wherever they
    have gone."""
    name = f"{MARK}_{uuid.uuid4().hex}"
    os.environ[name] = "1"
    try:
        yield lambda: marked_processes(name)
    finally:
        del os.environ[name]


def marked_processes(name: str) -> list[int]:
    """Processes with the variable in the environment they were started with; a fork keeps it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment, state = (
                    (entry / "environ").read_bytes(),
                    (entry / "stat").read_text().rpartition(")")[2],
                )
            except OSError:  # it ended, or is another user's
                continue
            if f"{name}=1".encode() in environment and not state.startswith(" Z"):
                found.append(int(entry.name))
    return found


def none_left(processes, seconds: float = 10.0) -> bool:
    """Whether all of them end within the time."""
    until = time.monotonic() + seconds
    while processes():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
