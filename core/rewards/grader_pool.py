"""Grading in processes that can be killed: every job has a deadline, and nothing a scorer does reaches the trainer.

Jobs go as JSON to a supervisor process (:mod:`core.rewards.grader_supervisor`), which holds the graders; no pickle is
read on either side. Libraries for this (``concurrent.futures``, pebble) were tried: they kill a worker, but not the
processes that it has started, and they unpickle what it sends (results/LOG.md).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core.errors import WorkersLost
from core.rewards.grading import Failure, Job, Scorers
from reward_scores.score import Score, ScoreStatus

CLOSE_S = 15.0  # for the supervisor to kill its graders and end
SUPERVISORS = 3  # that may die under a request
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

log = logging.getLogger(__name__)


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Grades jobs in ``num_workers`` graders (None: one a core, at most 4).

    A job that takes longer than ``timeout_s``, counted from when a grader begins it, gets status timeout; one whose
    grader dies, or whose scorer raises, gets crash. A grader past its deadline is killed with everything it started,
    and replaced. It may map ``memory_limit_mb`` MiB (None: no limit; a limit that is too low for what the user's
    module imports shows at start). An asynchronous function runs in the grader's own event loop, one job at a time.
    Where somebody else kills the supervisor or a grader (``kill -9``, a lack of memory), its jobs are graded once more.

    A batched function is called with the jobs of :meth:`run_together`; ``timeout_s`` is then the time of that call.
    What a job holds must be JSON (:func:`to_json`). No process is started before the first job.
    """

    def __init__(
        self,
        scorers: Scorers,
        *,
        num_workers: int | None = None,
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = 1024,
    ):
        self.timeout_s = timeout_s
        self.num_workers = num_workers or min(4, cores())
        self.settings = {
            "num_workers": self.num_workers,
            "memory_limit_mb": memory_limit_mb,
            "reward_kwargs": scorers.reward_kwargs,
            "custom": scorers.custom and scorers.custom.settings,
        }
        self.preloaded: tuple[str, ...] = ()
        self._supervisor: _Link | None = None

    def preload(self, libraries: Iterable[str]) -> None:
        """Name functions (``module:name``) that import slow libraries in the supervisor: all graders then have them."""
        self.preloaded = tuple(sorted({*self.preloaded, *libraries}))

    async def run(self, job: Job) -> Score | Failure:
        return (await self.run_together([job]))[0]

    async def run_together(self, jobs: Sequence[Job]) -> list[Score | Failure]:
        """Return the results of jobs that one grader gets at once, in the time of one: a batched function's one call.

        Raises WorkersLost where supervisor after supervisor dies: that is never the fault of an answer.
        """
        try:
            body = to_json(list(map(vars, jobs)))
        except (TypeError, ValueError) as error:
            return [Failure(ScoreStatus.CRASH, f"a job for a grader must be JSON: {error}")] * len(jobs)
        for _ in range(SUPERVISORS):
            if self._supervisor is None or not self._supervisor.alive:
                self._supervisor = _Link({**self.settings, "preload": self.preloaded})
            supervisor = self._supervisor
            try:
                number, future = supervisor.submit(body, self.timeout_s)
                return _results(*await asyncio.wrap_future(future), len(jobs))
            except asyncio.CancelledError:
                supervisor.withdraw(number)
                raise
            except WorkersLost as error:
                if supervisor.closed:
                    return [Failure(ScoreStatus.CRASH, str(error))] * len(jobs)
                lost = error
        raise lost

    def close(self) -> None:
        """Kill the graders. The next job would start new ones."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None


class _Link:
    """The driver's end of a supervisor process. A thread reads its results, so that event loops may come and go."""

    def __init__(self, settings: Mapping[str, Any]):
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "core.rewards.grader_supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is the driver's: the step it finishes still needs its scores
            # One thread: the supervisor forks, and a thread's memory counts against the graders' limit
            env={**os.environ, "PYTHONPATH": path, **dict.fromkeys(SINGLE_THREADED, "1")},
        )
        self.alive, self.closed = True, False
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future] = {}
        self._lock = threading.Lock()  # of a request's entry against the end: none is entered that nobody resolves
        self._send(to_json({**settings, "driver": os.getpid()}))
        self._reader = threading.Thread(target=self._read, name="reward-pool", daemon=True)
        self._reader.start()

    def submit(self, body: str, seconds: float) -> tuple[int, concurrent.futures.Future]:
        number, future = next(self._numbers), concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # it is no longer cancelled then, so that its result can always be set
        with self._lock:
            if not self.alive:
                raise self._lost()
            self._waiting[number] = future
        self._send(f"{number} {seconds!r} {body}")
        return number, future

    def withdraw(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self._send(f"{number} -")

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead: the reader tells everybody
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            number, status, body = line.split(b" ", 2)
            if (future := self._waiting.pop(int(number), None)) is not None:
                future.set_result((status.decode(), body))
        self.process.wait()
        with self._lock:
            self.alive = False
            left, self._waiting = self._waiting, {}
        if left and not self.closed:
            log.warning("%s; a new supervisor grades what it had not finished", self._lost())
        for future in left.values():
            future.set_exception(self._lost())

    def _lost(self) -> WorkersLost:
        status = self.process.returncode
        return WorkersLost(f"the supervisor of the graders ended with status {status}; see the messages above")

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(CLOSE_S)
        self.process.stdout.close()


def _results(status: str, answer: bytes, count: int) -> list[Score | Failure]:
    """Read what a grader wrote (:class:`core.rewards.grader_process._Grading`): its scorer may have written it."""
    try:
        value = json.loads(answer)
        if status != "graded":
            return [Failure(ScoreStatus(status), str(value))] * count
        if isinstance(value, dict):
            return [Failure(ScoreStatus.CRASH, f"{value['wrong']}\n", fatal=True)] * count
        scores = [
            Failure(ScoreStatus.CRASH, result)
            if isinstance(result, str)
            else Score(**{**result, "status": ScoreStatus(result["status"])})
            for result in value
        ]
        if len(scores) != count:
            raise ValueError(f"{len(scores)} scores for {count} jobs")
        return scores
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return [Failure(ScoreStatus.CRASH, f"unreadable result ({error}): {answer[:200]!r}")] * count


def to_json(value: Any) -> str:
    """Write what goes to a grader. Raises TypeError or ValueError that names what is not JSON."""

    def as_dict(value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} is not JSON: {value!r:.100}")

    return json.dumps(value, default=as_dict)
