"""What the tests of runs over Ray share: a run whose processes all carry a mark, and who is left of
them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.kill_and_resume import CmdFactory, launched, read_lines
from tests.pools import marked_processes, none_left

PATIENCE_S = 800  # for a run to end, with all its restarts, on a busy machine
LEFT_S = 90  # after which nothing of a run may be there
# Not Ray's 15: on a busy machine its workers would starve, and deadlines pass
NICE = {"RAY_worker_niceness": "0"}


class Run(NamedTuple):
    """A run over Ray that ended by itself; ``seconds`` from the act to the end."""

    status: int
    folder: Path
    log: str
    seconds: float
    nothing_left: bool


class Watched:
    """A run that goes on. Every process that it starts, wherever it goes, has the mark in its
    environment."""

    def __init__(self, process: subprocess.Popen, folder: Path, mark: str):
        self.process, self.folder, self.mark = process, folder, mark

    def pids(self, beginning: str = "") -> list[int]:
        """Its processes whose title begins so, in the order of their ids."""
        return sorted(
            pid for pid in marked_processes(self.mark) if title(pid).startswith(beginning)
        )

    def steps(self) -> int:
        """Complete steps; a validation before the first counts too."""
        return len(read_lines(self.folder / "metrics.jsonl"))

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return self.folder.with_name(f"{self.folder.name}.log").read_text()


@contextmanager
def watched(
    factory: CmdFactory, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[Watched]:
    mark = f"RUN_{uuid.uuid4().hex}"
    # Ray writes its titles over the environment that /proc shows, unless told to leave it
    variables = {**(env or {}), mark: "1", "SPT_NOENV": "1", **NICE}
    with launched(factory(folder), folder, variables) as process:
        yield Watched(process, folder, mark)


def disturbed(
    factory: CmdFactory,
    folder: Path,
    act: Callable[[Watched], None] = lambda run: None,
    after: int = 0,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Runs the command to its end; ``act`` happens once ``after`` lines of metrics are written."""
    with watched(factory, folder, env) as run:
        run.until(lambda: run.steps() >= after)
        act(run)
        start = time.monotonic()
        status = run.process.wait(PATIENCE_S)
        return Run(status, folder, run.log(), time.monotonic() - start, none_left(run.pids, LEFT_S))


def killing(title: str) -> Callable[[Watched], None]:
    """Kills the last of the run's processes of this title.

    Ray rewrites a title as a call begins and ends: it may be caught in between.
    """

    def kill(run: Watched) -> None:
        pids: list[int] = []
        run.until(lambda: pids.extend(run.pids(title)) or pids)
        os.kill(pids[-1], signal.SIGKILL)

    return kill


def title(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def ordinals(folder: Path) -> list[int]:
    """Of every prompt that the steps trained on, in order, from what each step dumped last."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    return [
        ordinal
        for path in files
        for ordinal in dict.fromkeys(json.loads(line)["ordinal"] for line in read_lines(path))
    ]
