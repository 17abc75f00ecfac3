"""Processes that many small runs share: what a run imports and fills its caches with is there for the next one.

Each process has one thread, is forked from one that has already imported what runs need, and does one run after the
other. A run that raises ends alone. One that takes its process with it (a crash, a kill) ends alone too: another
process takes its place. Nothing is passed from run to run: a run seeds its generators and has a folder of its own.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

# What every run imports beside what its study names: hydra and arrow, where a run first needs them.
OF_EVERY_RUN = ("core.config.composition", "core.tracking.tracker", "pyarrow.compute", "pyarrow.parquet")


@dataclass(frozen=True)
class Task:
    """A run: the arguments of the module that trains, and the file that gets what it prints."""

    arguments: Sequence[str]
    log: Path


class Ended(NamedTuple):
    """How a run ended: its exit status, its seconds and CPU seconds, and the memory of its process after it."""

    status: int
    seconds: float
    cpu_s: float = 0.0
    resident_mb: float = 0.0


class _Worker:
    def __init__(self, entry: str):
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, entry))
        self.process.start()
        theirs.close()  # ours alone is open then, and its end is seen
        self.key: Any = None
        self.started = 0.0

    def begin(self, key: Any, task: Task) -> None:
        self.key, self.started = key, time.monotonic()
        self.pipe.send(task)

    def ended(self) -> Ended:
        """Return how the run ended; the process may have ended with it."""
        seconds = time.monotonic() - self.started
        try:
            status, cpu_s, resident_mb = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Ended(self.process.exitcode or -1, seconds)
        return Ended(status, seconds, cpu_s, resident_mb)

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


def run_all(
    tasks: Iterable[tuple[Any, Task]], entry: str, jobs: int, preload: Sequence[str], runs_each: float = float("inf")
) -> Iterator[tuple[Any, Ended]]:
    """Do ``python -m entry`` for each task, ``jobs`` side by side, and yield (key, how it ended) as they end.

    A process is replaced after ``runs_each`` runs, and when a run took it along.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*preload, *OF_EVERY_RUN, __name__])
    idle: list[tuple[_Worker, int]] = []  # with the runs that it has done
    busy: dict[Any, tuple[_Worker, int]] = {}
    left = iter(tasks)
    try:
        while True:
            while len(busy) < jobs and (item := next(left, None)):
                worker, done = idle.pop() if idle else (_Worker(entry), 0)
                worker.begin(*item)
                busy[worker.pipe] = worker, done + 1
            if not busy:
                return
            for pipe in connection.wait(list(busy)):
                worker, done = busy.pop(pipe)
                ended = worker.ended()
                if done < runs_each and worker.process.is_alive():
                    idle.append((worker, done))
                else:
                    worker.close()
                yield worker.key, ended
    finally:
        for worker, _ in idle:
            worker.close()
        for worker, _ in busy.values():  # whoever reads no more wants no more
            worker.process.terminate()


def _serve(pipe: connection.Connection, entry: str) -> None:
    """Do the runs that arrive, until the other end is closed."""
    spent = 0.0  # the first run counts what loading costs
    while True:
        try:
            status = _run(entry, pipe.recv())
            before, spent = spent, time.process_time()
            if not before:  # what was loaded stays, and need not be looked through after every run
                gc.freeze()
            pipe.send((status, spent - before, _resident_mb()))
        except (EOFError, BrokenPipeError):
            return


def _run(entry: str, task: Task) -> int:
    """Do ``python -m entry arguments`` in this process and return its exit status; what it prints goes to its log."""
    with open(task.log, "w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = [entry, *task.arguments]
    sys.orig_argv = [sys.executable, "-m", entry, *task.arguments]  # which the run's manifest holds
    status: Any = 0
    try:
        runpy.run_module(entry, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code or 0
    except Exception:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):  # sys.exit("why")
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()  # models and their caches are in circles
    return status


def _resident_mb() -> float:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages.exists() else 0.0
