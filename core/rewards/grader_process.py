"""A grader's process: it forks what grades, so that a replacement takes milliseconds, and lets nothing outlive it.

``python -m core.rewards.grader_process`` is started by :class:`core.rewards.graders.Grader` alone; its lines are
described there. The fork takes jobs until it dies: killed (SIGUSR1 here), by its own fault, or after a job whose scorer
has left a process behind. Then its session and all that has left that session (a daemon comes to this process, which is
a subreaper) are killed, and the next job gets another fork. This process ends on SIGTERM, which the kernel sends when
the driver's thread of graders is gone, also after ``kill -9``; the fork is killed by the kernel with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from core.config.code_by_path import load_object
from core.rewards.custom_reward import CustomFunction
from core.rewards.grading import Failure, Job, ScoreError, Scorers, as_score, as_scores, report

JOBS, RESULTS = 3, 4  # file descriptors
JOB_FIELDS = ("data_source", "response", "ground_truth", "extra_info")
LONGEST_DETAIL = 10_000  # characters of a traceback: an exception may quote the answer that caused it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = {number.value: number.name for number in signal.Signals}


class Keeper:
    """Starts a fork for the jobs that wait, and cleans up after it."""

    def __init__(self, settings: Mapping[str, Any]):
        self.settings, self.fork = settings, 0

    def serve(self) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: self.kill_fork())
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        jobs = select.poll()
        jobs.register(JOBS, select.POLLIN)
        while not jobs.poll()[0][1] & select.POLLHUP:  # until the driver closes its end
            me, fork = os.getpid(), os.fork()
            if fork == 0:
                become_fork(self.settings, me)
            self.fork = fork
            dead = os.waitid(os.P_PID, fork, os.WEXITED | os.WNOWAIT)  # not reaped: its id is still its session's
            self.kill_all()
            how = f"exited with status {dead.si_status}"
            if dead.si_code != os.CLD_EXITED:
                how = f"died of {SIGNALS.get(dead.si_status, dead.si_status)}"
            write_line(RESULTS, b"\n0 died " + how.encode())  # behind what it may have begun to write
        self.kill_all()

    def kill_fork(self) -> None:
        for kill in (os.killpg, os.kill):  # both: it may not have its session yet
            with contextlib.suppress(ProcessLookupError):
                if self.fork:
                    kill(self.fork, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill the fork's session and every child, those included that come to this process as others die."""
        self.kill_fork()
        children = Path(f"/proc/self/task/{os.getpid()}/children")  # Linux alone has it
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in children.read_text().split() if children.exists() else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                os.waitpid(-1, 0)
        self.fork = 0

    def end(self) -> NoReturn:
        self.kill_all()
        os._exit(0)


def become_fork(settings: Mapping[str, Any], keeper: int) -> NoReturn:
    """Turn a fork of the keeper into what grades, in a session of its own; never return."""
    status = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before the line above
            os._exit(1)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # children's children come to this process when their parent ends
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if settings["memory_limit_mb"] is not None:
            resource.setrlimit(resource.RLIMIT_AS, (settings["memory_limit_mb"] * 2**20,) * 2)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out all the same, a grader is killed, not the training
        _grade_jobs(settings)
        status = 0
    except BaseException:  # whatever it is, this process must not go on as a second keeper
        traceback.print_exc()
    finally:
        os._exit(status)


def _grade_jobs(settings: Mapping[str, Any]) -> None:
    grade, me, last = _Grading(settings), os.getpid(), 0
    with os.fdopen(JOBS, "rb", closefd=False) as lines:
        for line in lines:
            number, _, jobs = line.partition(b" ")
            if not number.isdigit() or int(number) <= last:  # the rest of a line, or jobs that were sent twice
                continue
            last = int(number)
            write_line(RESULTS, number + b" begun")
            reply, fit = grade(jobs)
            if os.getpid() != me:  # a scorer forked, and this is the child that came back from it as well
                return
            signal.setitimer(signal.ITIMER_REAL, 0)
            fit = fit and not _has_children()
            write_line(RESULTS, b" ".join((number, b"more" if fit else b"last", reply)))
            if not fit:
                return


class _Grading:
    """From jobs (a JSON list) to their JSON: a list of scores or their failures' texts, or one text for all.

    What a batched function returned in another number than the jobs is an object with the key ``wrong``.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.runner = asyncio.Runner()  # of asynchronous functions: one event loop for the life of the process
        self.load_error = b""
        try:
            self.custom = CustomFunction(**settings["custom"]) if settings["custom"] else None
            self.scorers = Scorers(settings["reward_kwargs"], self.custom)
        except BaseException as error:  # a user's module may fail in any way; every job is answered with the report
            self.load_error = _detail(error)

    def __call__(self, jobs: bytes) -> tuple[bytes, bool]:
        """Return the reply, and whether the process is fit for more."""
        if self.load_error:
            return self.load_error, False
        try:
            return json.dumps(self._results(json.loads(jobs))).encode(), True
        except BaseException as error:  # a scorer may fail in any way; that is a status
            # Unfit after sys.exit and the like, and after a lack of memory, which may have hit anything
            return _detail(error), isinstance(error, Exception) and not isinstance(error, MemoryError)

    def _results(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any] | str] | dict[str, str]:
        if self.custom is None or not self.custom.batched:
            return [vars(as_score(self._finished(self.scorers(Job(**job))))) for job in jobs]
        result = self._finished(self.custom.call_batch(*([job[field] for job in jobs] for field in JOB_FIELDS)))
        try:
            scores = as_scores(result, len(jobs))
        except ScoreError as error:
            return {"wrong": str(error)}
        return [score.detail[-LONGEST_DETAIL:] if isinstance(score, Failure) else vars(score) for score in scores]

    def _finished(self, result: Any) -> Any:
        # wait_for makes a coroutine of any awaitable
        return self.runner.run(asyncio.wait_for(result, None)) if inspect.isawaitable(result) else result


def _detail(error: BaseException) -> bytes:
    return json.dumps(report(error)[-LONGEST_DETAIL:]).encode()


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    return False


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def write_line(fd: int, line: bytes) -> None:
    """Write all of it to a pipe that blocks, past Python's buffers."""
    rest = memoryview(line + b"\n")
    while rest:
        rest = rest[os.write(fd, rest) :]


def main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as driver:  # unbuffered: it takes nothing after the line
        line = driver.readline()
    if not line:  # the driver is gone already
        return
    settings = json.loads(line)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != settings["driver"]:
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for fd, place in ((0, JOBS), (1, RESULTS)):
        os.dup2(fd, place, inheritable=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a scorer prints is seen, and is no message
    for function in settings["preload"]:
        load_object(function)()
    with contextlib.suppress(BrokenPipeError):  # the driver no longer reads
        Keeper(settings).serve()


if __name__ == "__main__":
    main()
