"""Grading in this process, or in graders: processes that are killed at a deadline.

A grader has a session of its own, and reads and writes lines of JSON. Its parent measures the time:
a grader that misses a deadline is killed with its session, and the next answer starts another one.
``python -m core.rewards.graders`` is such a process (:func:`main`); only :class:`Grader` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import queue
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from core.config.code_by_path import load_object
from core.errors import WorkersLost
from core.rewards.grading import CustomFunction, Failure, Job, Scorers, as_score, crash
from reward_scores.score import Score, ScoreStatus

START_S = 120.0  # seconds for a grader's imports, which do not count as the answer's time
END_S = 5.0  # seconds for a grader that closed its pipe to end
LONGEST_LINE = 64 * 2**20  # bytes of a grader's reply
# Characters of a traceback: an exception may quote the answer that caused it
LONGEST_DETAIL = 10_000
# A thread's memory counts against the limit
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
PR_SET_PDEATHSIG = 1


@dataclass
class InProcess:
    """Grades in this process, one answer after the other.

    Scorers whose libraries may not finish grade in ``pool``.
    """

    scorers: Scorers
    pool: GraderPool

    async def run(self, job: Job) -> Score | Failure:
        try:
            if self.scorers.libraries(job.data_source):
                return await self.pool.run(job)
            result = self.scorers(job)
            return as_score(await result if inspect.isawaitable(result) else result)
        except WorkersLost:  # the pool's, and never the fault of an answer
            raise
        except BaseException as error:
            # sys.exit in a scorer must not end the run, which would look finished
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise  # the caller that awaits the score was cancelled
            return crash(error)

    def close(self) -> None:
        self.pool.close()


class GraderPool:
    """Grades in ``num_workers`` graders, which start with the first answers.

    An answer that takes longer than ``timeout_s`` has status timeout. An answer whose grader dies
    twice, or whose scorer raises, has status crash. A grader may map ``memory_limit_mb`` MiB (None:
    no limit).
    """

    def __init__(
        self,
        scorers: Scorers,
        num_workers: int = 1,
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = 1024,
    ):
        self.timeout_s = timeout_s
        self.settings = {
            "driver": os.getpid(),
            "memory_limit_mb": memory_limit_mb,
            "reward_kwargs": scorers.reward_kwargs,
            "named": scorers.named,
            "custom": scorers.custom and scorers.custom.settings,
            "preload": [],
        }
        self.graders = [Grader(self.settings) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[Grader] = queue.LifoQueue()
        # Last in, first out: a grader that runs is taken before one that would have to start
        for grader in reversed(self.graders):
            self._idle.put(grader)
        # A thread waits for each grader
        self._threads = ThreadPoolExecutor(len(self.graders), "grader")

    def preload(self, libraries: Iterable[str]) -> None:
        """Name functions (``module:name``) that import slow libraries when a grader starts."""
        self.settings["preload"] = sorted({*self.settings["preload"], *libraries})

    async def run(self, job: Job) -> Score | Failure:
        """Return the result of an answer.

        Raises WorkersLost if no grader starts, which is never the fault of an answer.
        """
        try:
            line = to_json(vars(job))
        except (TypeError, ValueError) as error:
            return Failure(ScoreStatus.CRASH, f"a job for a grader must be JSON: {error}")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, line)

    def _grade(self, line: str) -> Score | Failure:
        grader = self._idle.get()
        try:
            return grader.grade(line, self.timeout_s)
        finally:
            self._idle.put(grader)

    def close(self) -> None:
        """Kill the graders, also while they grade. A second call does nothing."""
        for grader in self.graders:
            grader.closed = True
            grader.kill()
        self._threads.shutdown(cancel_futures=True)


class Grader:
    """One grading process, which is started when it is first needed. Methods block.

    The first line to it has the settings, and each other line a job. The first line from it is
    null, once it is ready, and each other line is ``[result, fit, crowded]``. A result is the
    fields of a score, or the text of a failure. A grader that is not ``fit`` is killed. A grader is
    ``crowded`` if a scorer left threads or tasks behind, which may hold up the next answer.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = settings
        self.closed = False
        self.crowded = False
        self.process: subprocess.Popen[bytes] | None = None

    def grade(self, job: str, seconds: float) -> Score | Failure:
        """Return the result of a job. Raises WorkersLost if no process starts."""
        # A second try: a death from outside is no fault of the answer, nor are threads that an
        # earlier answer left behind. An answer that kills or holds up its grader does so again.
        for _ in range(2):
            if not self.closed and (self.process is None or self.process.poll() is not None):
                self._start()
            process = self.process
            if self.closed or process is None:  # closed before or while it started
                return Failure(ScoreStatus.CRASH, "the graders were closed")
            crowded = self.crowded
            try:
                reply = self._ask(process, job, seconds)
            except TimeoutError:
                self.kill()
                if crowded:
                    continue
                return Failure(
                    ScoreStatus.TIMEOUT, f"killed after {seconds:g} s (reward_model.timeout_s)"
                )
            if reply:
                return self._result(reply)
            self.kill()
        return Failure(ScoreStatus.CRASH, f"the grader {_end(process)} before it returned a score")

    def _start(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.crowded = False
        process = subprocess.Popen(
            [sys.executable, "-m", "core.rewards.graders"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A Ctrl-C is for the driver: the step that it finishes still needs its scores
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, **SINGLE_THREADED},
        )
        self.process = process
        os.set_blocking(process.stdin.fileno(), False)
        try:
            ready = self._ask(process, to_json(self.settings), START_S)
        except TimeoutError:
            ready = b""
        if not ready and not self.closed:
            self.kill()
            raise WorkersLost(
                f"a grader {_end(process)} before it was ready; see the messages above"
            )

    def _ask(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> bytes:
        """Send a line and return the next one, or nothing if the process ends.

        Raises TimeoutError.
        """
        end = time.monotonic() + seconds
        reply = bytearray()
        with contextlib.suppress(BrokenPipeError):  # it is dead, which reading finds
            _write(process.stdin.fileno(), line.encode() + b"\n", end)
        while not reply.endswith(b"\n") and len(reply) < LONGEST_LINE:
            if not wait([process.stdout], max(0.0, end - time.monotonic())):
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), 2**20)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)  # the status shall be its own, and not that of the kill
                return b""
            reply += chunk
        return bytes(reply)

    def _result(self, reply: bytes) -> Score | Failure:
        """Read a reply, which a scorer may have written itself."""
        try:
            fields, fit, self.crowded = json.loads(reply)
            if isinstance(fields, str):
                result = Failure(ScoreStatus.CRASH, fields)
            else:
                result = Score(**{**fields, "status": ScoreStatus(fields["status"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            detail = f"unreadable result ({error!s:.200}): {reply[:200]!r}"
            result = Failure(ScoreStatus.CRASH, detail)
            fit = False
        if not fit:
            self.kill()
        return result

    def kill(self) -> None:
        """Kill the process and its session. The next call starts another."""
        process = self.process
        # After the wait its id may be that of another process, which no second call may kill
        self.process = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _write(pipe: int, line: bytes, end: float) -> None:
    """Write to a pipe that does not block.

    Raises TimeoutError at the time ``end`` if nobody reads the other side.
    """
    unsent = memoryview(line)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_WRITE)
        while unsent:
            if not selector.select(max(0.0, end - time.monotonic())):
                raise TimeoutError
            unsent = unsent[os.write(pipe, unsent) :]


def to_json(value: Any) -> str:
    """Return a value as the JSON for a grader.

    Raises TypeError or ValueError that names what is not JSON.
    """

    def as_dict(value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} is not JSON: {value!r:.100}")

    return json.dumps(value, default=as_dict)


def _end(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    """Read the settings and grade the jobs, until the driver closes the pipe or has ended."""
    jobs = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a scorer that reads its input gets no job
    os.dup2(2, 1)  # a scorer's output goes to the terminal, and is no reply
    settings = json.loads(jobs.readline())
    if sys.platform == "linux":  # end with the driver's thread, also after kill -9
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != settings["driver"]:
        return
    for function in settings["preload"]:
        load_object(function)()
    if settings["memory_limit_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (settings["memory_limit_mb"] * 2**20,) * 2)
    custom = settings["custom"] and CustomFunction(**settings["custom"])
    scorers = Scorers(settings["reward_kwargs"], custom, settings["named"])
    pid = os.getpid()
    runner = asyncio.Runner()  # one event loop for the life of the process
    replies.write(b"null\n")
    for line in jobs:
        try:
            score = scorers(Job(**json.loads(line)))
            if inspect.isawaitable(score):
                # wait_for makes a coroutine of any awaitable
                score = runner.run(asyncio.wait_for(score, None))
            result = vars(as_score(score))
            fit = True
        except BaseException as error:  # a scorer may fail in any way; that is a status
            result = crash(error).detail[-LONGEST_DETAIL:]
            # Not fit after sys.exit and the like, nor after a lack of memory, which may have hit
            # anything
            fit = isinstance(error, Exception) and not isinstance(error, MemoryError)
        # If a scorer forked, its child returns from the scorer too
        if os.getpid() != pid:
            os._exit(1)
        # An alarm of this answer's scorer must not end the next one
        signal.setitimer(signal.ITIMER_REAL, 0)
        crowded = threading.active_count() > 1 or bool(asyncio.all_tasks(runner.get_loop()))
        replies.write(json.dumps([result, fit, crowded]).encode() + b"\n")


if __name__ == "__main__":
    main()
