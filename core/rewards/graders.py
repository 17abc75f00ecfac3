"""Where answers are graded: in this process, or in graders, processes that can be killed at a deadline.

A grader is a process in a session of its own, which reads and writes lines of JSON. Its parent counts the time: a
grader that misses a deadline is killed with everything it started, and the next job starts another. Libraries for this
(``concurrent.futures``, pebble) kill a process, but not those that it has started, and unpickle what it sends.

``python -m core.rewards.graders`` is such a process (:func:`main`); :class:`Grader` alone starts it.
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
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from core.config.code_by_path import load_object
from core.errors import WorkersLost
from core.rewards.custom_reward import CustomFunction
from core.rewards.grading import Failure, Job, Scorers, as_results, as_score, crash
from reward_scores.score import Score, ScoreStatus

START_S = 120.0  # for a grader to import what it needs, which is not the answer's time
END_S = 5.0  # for a grader that closed its pipe to be gone
LONGEST_LINE = 64 * 2**20  # bytes of a grader's reply
LONGEST_DETAIL = 10_000  # characters of a traceback: an exception may quote the answer that caused it
# One thread: a thread's memory counts against the limit
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
BY_OTHERS = (signal.SIGKILL, signal.SIGTERM)  # an administrator's, or the kernel's where memory runs out
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class InProcess:
    """Grades in this process, one job after the other. What a library may not finish goes to ``pool``."""

    def __init__(self, scorers: Scorers, pool: GraderPool | None = None):
        self.scorers, self.pool = scorers, pool

    async def run(self, job: Job) -> Score | Failure:
        try:
            if self.pool is not None and self.scorers.libraries(job.data_source):
                return await self.pool.run(job)
            result = self.scorers(job)
            return as_score(await result if inspect.isawaitable(result) else result)
        except WorkersLost:  # of the pool: never the fault of an answer
            raise
        except (Exception, SystemExit) as error:  # sys.exit in a scorer must not end the run, which would look finished
            return crash(error)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


class GraderPool:
    """Grades jobs in ``num_workers`` graders (None: one a core, at most 4), which start with the first jobs.

    A job that takes longer than ``timeout_s`` gets status timeout; one whose grader dies, or whose scorer raises, gets
    crash. A grader may map ``memory_limit_mb`` MiB (None: no limit). An asynchronous function runs in the grader's own
    event loop, one job at a time.
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
        self.settings = {
            "driver": os.getpid(),
            "memory_limit_mb": memory_limit_mb,
            "reward_kwargs": scorers.reward_kwargs,
            "custom": scorers.custom and scorers.custom.settings,
            "preload": [],
        }
        self.graders = [Grader(self.settings) for _ in range(num_workers or min(4, os.cpu_count() or 1))]
        self._idle: queue.LifoQueue[Grader] = queue.LifoQueue()
        for grader in reversed(self.graders):  # the first one is taken first: as few start as are needed
            self._idle.put(grader)
        self._threads = ThreadPoolExecutor(len(self.graders), "grader")  # one waits for each grader

    def preload(self, libraries: Iterable[str]) -> None:
        """Name functions (``module:name``) that import slow libraries when a grader starts."""
        self.settings["preload"] = sorted({*self.settings["preload"], *libraries})

    async def run(self, job: Job) -> Score | Failure:
        return (await self.run_together([job]))[0]

    async def run_together(self, jobs: Sequence[Job]) -> list[Score | Failure]:
        """Return the results of jobs that a function of lists gets in one call, in the time of one.

        Raises WorkersLost where no grader starts: that is never the fault of an answer.
        """
        try:
            body = to_json(list(map(vars, jobs)))
        except (TypeError, ValueError) as error:
            return [Failure(ScoreStatus.CRASH, f"a job for a grader must be JSON: {error}")] * len(jobs)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, body)
        return [found] * len(jobs) if isinstance(found, Failure) else found

    def _grade(self, jobs: str) -> list[Score | Failure] | Failure:
        grader = self._idle.get()
        try:
            return grader.grade(jobs, self.timeout_s)
        finally:
            self._idle.put(grader)

    def close(self) -> None:
        """Kill the graders, whatever they do. A second call does nothing."""
        for grader in self.graders:
            grader.closed = True
            grader.kill()
        self._threads.shutdown(cancel_futures=True)


class Grader:
    """One grading process, which is started when it is first needed. Methods block.

    Lines to it: the settings, then ``[number, jobs]`` for each call. Lines from it: ``[0]`` once it is ready, then
    ``[number, results, fit]``; one that is not ``fit`` has left something behind and is killed. A result is the fields
    of a score, or the text of a failure.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings, self.closed = settings, False
        self.process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def grade(self, jobs: str, seconds: float, again: bool = True) -> list[Score | Failure] | Failure:
        """Return one result a job, or why there is none. Raises WorkersLost where no process starts."""
        if self.closed:
            return Failure(ScoreStatus.CRASH, "the graders were closed")
        if self.process is None or self.process.poll() is not None:
            self._start()
        self._number += 1
        process = self.process
        try:
            reply = self._ask(process, f"[{self._number},{jobs}]", seconds)
        except TimeoutError:
            self.kill()
            return Failure(ScoreStatus.TIMEOUT, f"killed after {seconds:g} s (reward_model.timeout_s)")
        if reply:
            return self._results(reply)
        self.kill()
        if again and -process.returncode in BY_OTHERS:  # once, for the answer may have done it itself
            return self.grade(jobs, seconds, again=False)
        return Failure(ScoreStatus.CRASH, f"the grader {_end(process)} before it returned a score")

    def _start(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = self.process = subprocess.Popen(
            [sys.executable, "-m", "core.rewards.graders"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is the driver's: the step it finishes still needs its scores
            env={**os.environ, "PYTHONPATH": path, **SINGLE_THREADED},
        )
        try:
            ready = self._ask(process, to_json(self.settings), START_S)
        except TimeoutError:
            ready = b""
        if not ready and not self.closed:
            self.kill()
            raise WorkersLost(f"a grader {_end(process)} before it was ready; see the messages above")

    def _ask(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> bytes:
        """Send a line and return the next one; nothing where the process ends. Raises TimeoutError."""
        end, replies, poll, reply = time.monotonic() + seconds, process.stdout, select.poll(), bytearray()
        with contextlib.suppress(OSError):  # it is dead: what is read tells
            process.stdin.write(line.encode() + b"\n")
        poll.register(replies, select.POLLIN)
        while not reply.endswith(b"\n") and len(reply) < LONGEST_LINE:
            if not poll.poll(1000 * max(0.0, end - time.monotonic())):
                raise TimeoutError
            part = os.read(replies.fileno(), 2**20)
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)  # to know its own end, and not that it was killed
                return b""
            reply += part
        return bytes(reply)

    def _results(self, reply: bytes) -> list[Score | Failure] | Failure:
        """Read a reply, which a scorer may have written itself."""
        try:
            number, results, fit = json.loads(reply)
            if number != self._number:
                raise ValueError(f"it is of call {number}, not {self._number}")
            found = [
                Failure(ScoreStatus.CRASH, one)
                if isinstance(one, str)
                else Score(**{**one, "status": ScoreStatus(one["status"])})
                for one in results
            ]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.kill()
            return Failure(ScoreStatus.CRASH, f"unreadable result ({error!s:.200}): {reply[:200]!r}")
        if not fit:
            self.kill()
        return found

    def kill(self) -> None:
        """Kill the process and all that it started. The next call starts another."""
        process, self.process = self.process, None  # once: its id may be another's when it has been waited for
        if process is None:
            return
        started = _descendants(process.pid)  # known as long as it lives: orphans come to it
        for kill, pid in ((os.killpg, process.pid), *((os.kill, pid) for pid in started)):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        process.wait()


def to_json(value: Any) -> str:
    """Write what goes to a grader. Raises TypeError or ValueError that names what is not JSON."""
    return json.dumps(value, default=_as_dict)


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON: {value!r:.100}")


def _end(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):  # Linux alone has it
        with contextlib.suppress(OSError):
            children += map(int, file.read_text().split())
    return children + [one for child in children for one in _descendants(child)]


# -- the process ----------------------------------------------------------------------------------------


def main() -> None:
    """Read the settings and grade what comes, until the driver closes the pipe or is gone."""
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what a scorer reads is no job
    settings = json.loads(jobs.readline())
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # when the driver's thread is gone, also after kill -9
    if os.getppid() != settings["driver"]:
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # children's children come to this process when their parent ends
    os.dup2(2, 1)  # what a scorer prints is seen, and is no message
    for function in settings["preload"]:
        load_object(function)()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if settings["memory_limit_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (settings["memory_limit_mb"] * 2**20,) * 2)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out all the same, a grader is killed, not the training
    scorers = Scorers(settings["reward_kwargs"], settings["custom"] and CustomFunction(**settings["custom"]))
    me, runner = os.getpid(), asyncio.Runner()  # one event loop for the life of the process
    replies.write(b"[0]\n")
    for line in jobs:
        number, batch = json.loads(line)
        try:
            results, fit = _graded(scorers, [Job(**job) for job in batch], runner), True
        except BaseException as error:  # a scorer may fail in any way; that is a status
            results = [crash(error).detail[-LONGEST_DETAIL:]] * len(batch)
            # Unfit after sys.exit and the like, and after a lack of memory, which may have hit anything
            fit = isinstance(error, Exception) and not isinstance(error, MemoryError)
        if os.getpid() != me:  # a scorer forked, and this is the child that came back from it as well
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps([number, results, fit and not _has_children()]).encode() + b"\n")


def _graded(scorers: Scorers, jobs: Sequence[Job], runner: asyncio.Runner) -> list[Any]:
    """Return for each job the fields of its score, or the text of its failure."""

    def finished(result: Any) -> Any:
        # wait_for makes a coroutine of any awaitable
        return runner.run(asyncio.wait_for(result, None)) if inspect.isawaitable(result) else result

    if scorers.custom is None or not scorers.custom.batched:
        return [vars(as_score(finished(scorers(job)))) for job in jobs]
    lists = map(list, zip(*(vars(job).values() for job in jobs), strict=True))
    results = as_results(finished(scorers.custom.call_batch(*lists)), len(jobs))
    return [one.detail[-LONGEST_DETAIL:] if isinstance(one, Failure) else vars(one) for one in results]


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:  # reap those that have ended
            pass
        return True
    return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    main()
