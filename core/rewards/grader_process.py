"""A grader: a process that takes requests from its supervisor one at a time, and dies with it.

Only the supervisor (:mod:`core.rewards.grader_supervisor`) starts one, by a fork, so that a replacement is there in
milliseconds. It writes lines: one byte that tells what the line is, then JSON. Its deadline and its death are the
supervisor's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from core.rewards.custom_reward import CustomFunction
from core.rewards.grading import Failure, Job, ScoreError, Scorers, as_score, as_scores, report

READY, STARTED, REPLY, LAST_REPLY = b"R", b"S", b"=", b"!"
REPLIES = (REPLY, LAST_REPLY)

JOBS, RESULTS = 3, 4  # file descriptors in a grader
JOB_FIELDS = ("data_source", "response", "ground_truth", "extra_info")
LONGEST_DETAIL = 10_000  # characters of a traceback: an exception may quote the answer that caused it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def become_grader(settings: Mapping[str, Any], jobs: int, results: int, supervisor: int) -> NoReturn:
    """Turn a fork of the supervisor into a grader; never return.

    It takes a session of its own, to be killed as one, and closes the supervisor's pipes: they must end when it does.
    """
    status = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # children's children come to this process when their parent ends
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (jobs, results)]
        for fd, place in zip(above, (JOBS, RESULTS), strict=True):
            os.dup2(fd, place, inheritable=False)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what a scorer prints is seen, and is no message
        os.closerange(5, os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if settings["memory_limit_mb"] is not None:
            resource.setrlimit(resource.RLIMIT_AS, (settings["memory_limit_mb"] * 2**20,) * 2)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out all the same, a grader is killed, not the training
        _serve(settings)
        status = 0
    except BaseException:  # whatever it is, this process must not go on as a second supervisor
        traceback.print_exc()
    finally:
        os._exit(status)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _serve(settings: Mapping[str, Any]) -> None:
    grade = _Grading(settings)
    write_line(RESULTS, READY)
    me = os.getpid()
    with os.fdopen(JOBS, "rb", closefd=False) as requests:
        for line in requests:
            write_line(RESULTS, STARTED)
            reply, fit = grade(line)
            if os.getpid() != me:  # a scorer forked, and this is the child that came back from it as well
                return
            signal.setitimer(signal.ITIMER_REAL, 0)
            fit = fit and not _has_children()
            write_line(RESULTS, (REPLY if fit else LAST_REPLY) + reply)
            if not fit:
                signal.pause()  # until the supervisor has killed this process and what the scorer left behind


class _Grading:
    """From a request (a JSON list of jobs) to its JSON: a list of scores or their failures' texts, or one text for all.

    What a batched function returned in another number than the jobs is an object with the key ``wrong``.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.runner = asyncio.Runner()  # of asynchronous functions: one event loop for the life of the grader
        self.load_error = b""
        try:
            self.custom = CustomFunction(**settings["custom"]) if settings["custom"] else None
            self.scorers = Scorers(settings["reward_kwargs"], self.custom)
        except BaseException as error:  # a user's module may fail in any way; every request is answered with the report
            self.load_error = _detail(error)

    def __call__(self, line: bytes) -> tuple[bytes, bool]:
        """Return the reply, and whether the process is fit for another request."""
        if self.load_error:
            return self.load_error, False
        try:
            return json.dumps(self._results(json.loads(line))).encode(), True
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


def write_line(fd: int, line: bytes) -> None:
    """Write all of it to a pipe that blocks, past Python's buffers."""
    rest = memoryview(line + b"\n")
    while rest:
        rest = rest[os.write(fd, rest) :]
