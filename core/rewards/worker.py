"""A grading process: it takes requests from its keeper one at a time, and dies with it.

Only the keeper (:mod:`core.rewards.supervisor`) starts it, by a fork, so that a replacement is there in milliseconds.
What it writes are lines: one byte that says what the line is, then JSON.
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
from collections.abc import Awaitable, Mapping
from typing import Any, NoReturn

from core.rewards.custom import CustomFunction, as_score
from core.rewards.grading import Grader, Job
from reward_scores.score import Score

READY, UNFIT, STARTED, REPLY, LAST_REPLY = b"R", b"U", b"S", b"=", b"!"

JOBS, RESULTS = 3, 4  # file descriptors in the worker
LONGEST_DETAIL = 10_000  # characters of a traceback: an exception may quote the answer it choked on
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def become_worker(settings: Mapping[str, Any], jobs: int, results: int, keeper: int) -> NoReturn:
    """Turns a fork of the keeper into a worker; never returns."""
    status = 1
    try:
        _leave_the_keeper(jobs, results, keeper)
        _limit(settings["memory_limit_mb"])
        _serve(settings)
        status = 0
    except BaseException:  # whatever it is, this process must not go on as a second keeper
        traceback.print_exc()
    finally:
        os._exit(status)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _leave_the_keeper(jobs: int, results: int, keeper: int) -> None:
    """A session of its own, to be killed as one, and none of the keeper's pipes: they must end when the keeper does."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it died before the line above
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


def _limit(memory_mb: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20,) * 2)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out all the same, a worker goes, not the training


def _serve(settings: Mapping[str, Any]) -> None:
    try:
        grade = _Grading(settings)
    except BaseException:  # a user's module may fail in any way; the line is the report
        _write(UNFIT + json.dumps(_detail()).encode())
        return
    _write(READY)
    me = os.getpid()
    with os.fdopen(JOBS, "rb", closefd=False) as requests:
        for line in requests:
            _write(STARTED)
            reply, fit = grade(line)
            if os.getpid() != me:  # a scorer forked, and this is the child that came back from it as well
                return
            signal.setitimer(signal.ITIMER_REAL, 0)
            fit = fit and not _has_children()
            _write((REPLY if fit else LAST_REPLY) + reply)
            if not fit:
                signal.pause()  # until the keeper has killed this process and what the scorer left behind


class _Grading:
    """From a request (a JSON list of jobs) to its JSON: a list of scores, or a failure's text."""

    def __init__(self, settings: Mapping[str, Any]):
        custom = settings["custom"]
        self.batched = custom is not None and custom["batched"]
        self.grader = Grader(settings["reward_kwargs"], CustomFunction(**custom) if custom else None)
        self.runner = asyncio.Runner()  # of asynchronous functions: one event loop for the life of the worker

    def __call__(self, line: bytes) -> tuple[bytes, bool]:
        """The reply, and whether the process is fit for another request."""
        try:
            return json.dumps(list(map(vars, self._scores(line)))).encode(), True
        except MemoryError:
            return json.dumps(_detail()).encode(), False
        except Exception:  # a scorer may fail in any way; that is a status
            return json.dumps(_detail()).encode(), True
        except BaseException:  # sys.exit and the like
            return json.dumps(_detail()).encode(), False

    def _scores(self, line: bytes) -> list[Score]:
        jobs = [Job(**job) for job in json.loads(line)]
        result = self.grader.batch(jobs) if self.batched else self.grader(jobs[0])
        if inspect.isawaitable(result):
            result = self.runner.run(_awaited(result))
        return list(result) if self.batched else [as_score(result)]


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _detail() -> str:
    return traceback.format_exc(limit=-20)[-LONGEST_DETAIL:]


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    return False


def _write(line: bytes) -> None:
    rest = memoryview(line + b"\n")
    while rest:
        rest = rest[os.write(RESULTS, rest) :]
