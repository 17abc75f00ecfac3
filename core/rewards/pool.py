"""Grading in processes that can be killed: every job has a deadline, and nothing a scorer does reaches the trainer.

Jobs go as JSON to a keeper process (:mod:`core.rewards.supervisor`), which holds the workers. Libraries for this
(``concurrent.futures``, pebble) were weighed: they kill a worker, but not the processes it has started, and leave
workers in an endless loop behind when the driver is killed. No pickle is read on either side.
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
from core.rewards.custom import CustomFunction
from core.rewards.grading import Failure, Grader, Job
from reward_scores.score import Score, ScoreStatus

CLOSE_S = 15.0  # for the keeper to kill its workers and end
KEEPERS = 3  # that may die under a request
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

log = logging.getLogger(__name__)

Result = Score | Failure


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Grades jobs in ``num_workers`` processes (None: one a core, at most 4).

    A job that takes longer than ``timeout_s``, counted from when a worker begins it, gets status timeout; one whose
    worker dies, or whose scorer raises, gets crash. A worker past its deadline is killed with everything it started,
    and replaced. It may map ``memory_limit_mb`` MiB (None: no limit; a limit that is too low for what the user's
    module imports shows at start). An asynchronous function runs in the worker's own event loop, one job at a time.
    Where somebody else kills the keeper or a worker (``kill -9``, a lack of memory), its jobs are graded once more.

    What a job holds must be JSON: :func:`unsendable` says what is not. No process is started before the first job.
    """

    def __init__(
        self,
        grader: Grader,
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
            "reward_kwargs": grader.reward_kwargs,
            "custom": _custom(grader.custom),
            "preload": (),
        }
        self._keeper: _Keeper | None = None

    @property
    def preloaded(self) -> tuple[str, ...]:
        return self.settings["preload"]

    def preload(self, libraries: Iterable[str]) -> None:
        """Functions (``module:name``) that the parent of the workers calls when it starts, so that a worker that
        replaces a killed one has a slow library at hand. To be called before the first job."""
        self.settings["preload"] = tuple(sorted({*self.preloaded, *libraries}))

    async def run(self, job: Job) -> Result:
        return (await self.run_together([job]))[0]

    async def run_together(self, jobs: Sequence[Job]) -> list[Result]:
        """The results of jobs that one worker gets at once and in the time of one; they fail together.

        Raises WorkersLost where keeper after keeper dies: that is never the doing of an answer.
        """
        try:
            body = json.dumps(list(map(vars, jobs)), default=_as_dict)
        except (TypeError, ValueError) as error:
            return [Failure(ScoreStatus.CRASH, f"a job for a worker must be JSON: {error}")] * len(jobs)
        for last in range(KEEPERS):
            keeper = self._running()
            number, future = keeper.submit(body, self.timeout_s)
            try:
                status, answer = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                keeper.withdraw(number)
                raise
            except WorkersLost as error:
                if keeper.closed:
                    return [Failure(ScoreStatus.CRASH, str(error))] * len(jobs)
                if last == KEEPERS - 1:
                    raise
            else:
                break
        return _results(status, answer, len(jobs))

    def _running(self) -> _Keeper:
        if self._keeper is None or not self._keeper.alive:
            self._keeper = _Keeper(self.settings)
        return self._keeper

    def close(self) -> None:
        """Kills the workers. The next job would start new ones."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


class _Keeper:
    """The driver's end of a keeper process. A thread reads its answers, so that event loops may come and go."""

    def __init__(self, settings: Mapping[str, Any]):
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "core.rewards.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is the driver's: the step it finishes still needs its scores
            # One thread: the keeper forks, and a thread's memory counts against the workers' limit
            env={**os.environ, "PYTHONPATH": path, **dict.fromkeys(SINGLE_THREADED, "1")},
        )
        self.alive, self.closed = True, False
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future] = {}
        self._lock = threading.Lock()
        self._send(json.dumps({**settings, "driver": os.getpid()}))
        self._reader = threading.Thread(target=self._read, name="reward-pool", daemon=True)
        self._reader.start()

    def submit(self, body: str, seconds: float) -> tuple[int, concurrent.futures.Future]:
        future: concurrent.futures.Future = concurrent.futures.Future()
        number = next(self._numbers)
        with self._lock:
            if not self.alive:
                future.set_exception(self._lost())
                return number, future
            self._waiting[number] = future
        self._send(f"{number} {seconds!r} {body}")
        return number, future

    def withdraw(self, number: int) -> None:
        with self._lock:
            waited = self._waiting.pop(number, None)
        if waited is not None:
            self._send(f"{number} -")

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead: the reader says so to everybody
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            number, _, rest = line.partition(b" ")
            status, _, body = rest.partition(b" ")
            with self._lock:
                future = self._waiting.pop(int(number), None)
            _resolve(future, (status.decode(), body))
        self.process.wait()
        with self._lock:
            self.alive = False
            left, self._waiting = self._waiting, {}
        if left and not self.closed:
            log.warning("%s; a new keeper grades what was in its hands", self._lost())
        for future in left.values():
            _resolve(future, self._lost())

    def _lost(self) -> WorkersLost:
        status = self.process.returncode
        return WorkersLost(f"the keeper of the grading processes ended with status {status}; see the messages above")

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


def _resolve(future: concurrent.futures.Future | None, result: tuple[str, bytes] | WorkersLost) -> None:
    # It may be cancelled, now or at any time, and its event loop may be closed: nobody is there to be told.
    if future is not None:
        with contextlib.suppress(concurrent.futures.InvalidStateError, RuntimeError):
            if isinstance(result, WorkersLost):
                future.set_exception(result)
            else:
                future.set_result(result)


def _results(status: str, answer: bytes, count: int) -> list[Result]:
    """What the worker wrote, read with suspicion: its scorer may have written it."""
    try:
        value = json.loads(answer)
        if status == "graded":
            scores: list[Result] = [Score(**{**one, "status": ScoreStatus(one["status"])}) for one in value]
            if len(scores) == count:
                return scores
            raise ValueError(f"{len(scores)} scores for {count} jobs")
        return [Failure(ScoreStatus(status), str(value))] * count
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return [Failure(ScoreStatus.CRASH, f"unreadable result ({error}): {answer[:200]!r}")] * count


def _custom(custom: CustomFunction | None) -> dict[str, Any] | None:
    if custom is None:
        return None
    return {
        "path": custom.path,
        "name": custom.function_name,
        "kwargs": custom.kwargs,
        "batched": custom.batched,
    }


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON: {value!r:.100}")


def unsendable(value: Any) -> str | None:
    """Why a value of a data row cannot be sent to a worker, or None."""
    try:
        json.dumps(value, default=_as_dict)
    except (TypeError, ValueError) as error:
        return str(error)
    return None
