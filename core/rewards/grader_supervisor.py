"""The process between the driver and its graders: it starts them, counts their time, and kills them.

``python -m core.rewards.grader_supervisor`` is started by :class:`core.rewards.grader_pool.Pool` alone. It has one
thread and grades nothing. Its graders are forks of it, with the scorers already imported. Nothing outlives it or the
driver:

* a grader that is ended is killed with its session; what has left that session (a daemon) is adopted by this process,
  which is a subreaper, and killed as an orphan among its children;
* the kernel kills the graders when this process dies, by their own request;
* this process ends when the driver's pipe closes or the driver is no longer its parent, also after ``kill -9``.

Lines from the driver: settings (JSON), then ``<id> <seconds> <jobs, JSON>``, or ``<id> -`` to withdraw a request that
has not begun. Lines to the driver: ``<id> <graded|timeout|crash> <JSON>``.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.config.code_by_path import load_object
from core.rewards import grader_process

DRIVER_IN, DRIVER_OUT = 0, 1
START_S = 120.0  # for a grader to import the user's function, which is not the answer's time
TAKE_S = 5.0  # for a waiting grader to take what it is given
TRIES = 10  # graders that may die before they have begun a request
LOOK_S = 1.0  # how often this process looks whether its parent is still there
LONGEST_LINE = 64 * 2**20  # bytes of a grader's reply
SIGNALS = {number.value: number.name for number in signal.Signals}


@dataclass
class Request:
    """Jobs that one grader gets at once."""

    id: int
    seconds: float
    jobs: bytes
    tries: int = 0
    begun: bool = False  # by a grader that somebody else then killed


@dataclass(eq=False)
class GraderProcess:
    """What the supervisor knows of a grader."""

    pid: int
    jobs: int  # the ends of its pipes that are kept here
    results: int
    deadline: float | None  # of what it does now
    ready: bool = False
    ended: bool = False  # killed, its last request answered; not yet reaped
    request: Request | None = None
    started: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    outbox: memoryview = field(default_factory=lambda: memoryview(b""))


class Supervisor:
    """One loop over pipes, deadlines and deaths."""

    def __init__(self, settings: Mapping[str, Any]):
        self.settings, self.me = settings, os.getpid()
        self.graders: dict[int, GraderProcess] = {}
        self.queue: deque[Request] = deque()
        self.inbox = bytearray()
        self.orphans_possible = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(DRIVER_IN, selectors.EVENT_READ, self.read_driver)
        woken, wakes = os.pipe()
        for fd in (woken, wakes):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        self.selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 4096))

    def run(self) -> None:
        """Serve until the driver is gone, then kill every grader."""
        grader_process.prctl(grader_process.PR_SET_CHILD_SUBREAPER, 1)
        try:
            while os.getppid() == self.settings["driver"]:
                self.dispatch()
                deadlines = [grader.deadline for grader in self.graders.values() if grader.deadline is not None]
                wait_s = min([LOOK_S, *(deadline - time.monotonic() for deadline in deadlines)])
                for key, _ in self.selector.select(max(0.0, wait_s)):
                    if key.fd in self.selector.get_map():  # an event before it may have ended its grader
                        key.data()
                self.reap()
                self.expire()
                if self.orphans_possible:
                    self.kill_orphans()
        except BrokenPipeError:  # the driver no longer reads
            pass
        finally:
            self.end_all()

    # -- the driver --------------------------------------------------------------------------------

    def read_driver(self) -> None:
        data = os.read(DRIVER_IN, 2**20)
        if not data:
            sys.exit(0)
        for line in _lines(self.inbox, data):
            number, _, rest = line.partition(b" ")
            if rest == b"-":
                self.queue = deque(request for request in self.queue if request.id != int(number))
            else:
                seconds, _, jobs = rest.partition(b" ")
                self.queue.append(Request(int(number), float(seconds), jobs))

    def answer(self, request: Request, status: str, body: bytes | str) -> None:
        """Send a grader's own words (bytes of JSON), or a text of the supervisor's."""
        if isinstance(body, str):
            body = json.dumps(body).encode()
        grader_process.write_line(DRIVER_OUT, b"%d %s %s" % (request.id, status.encode(), body))

    # -- graders -----------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Give requests to graders that are free, and start graders while more requests wait, up to their number."""
        alive = [grader for grader in self.graders.values() if not grader.ended]
        for grader in alive:
            if self.queue and grader.ready and grader.request is None:
                self.assign(grader, self.queue.popleft())
        starting, room = sum(not grader.ready for grader in alive), self.settings["num_workers"] - len(alive)
        for _ in range(min(room, len(self.queue) - starting)):
            try:
                self.start_grader()
            except OSError as error:  # no process or pipe is to be had
                self.answer(self.queue.popleft(), "crash", f"no grader could be started: {error}")

    def start_grader(self) -> None:
        jobs_out, jobs_in, results_out, results_in = *os.pipe(), *os.pipe()
        try:
            pid = os.fork()
        except OSError:
            for fd in (jobs_out, jobs_in, results_out, results_in):
                os.close(fd)
            raise
        if pid == 0:
            grader_process.become_grader(self.settings, jobs_out, results_in, self.me)
        os.close(jobs_out)
        os.close(results_in)
        for fd in (jobs_in, results_out):
            os.set_blocking(fd, False)
        new = self.graders[pid] = GraderProcess(pid, jobs_in, results_out, deadline=time.monotonic() + START_S)
        self.selector.register(results_out, selectors.EVENT_READ, lambda: self.read(new))

    def assign(self, grader: GraderProcess, request: Request) -> None:
        request.tries += 1
        grader.request, grader.started = request, False
        grader.deadline = time.monotonic() + TAKE_S
        grader.outbox = memoryview(request.jobs + b"\n")
        self.selector.register(grader.jobs, selectors.EVENT_WRITE, lambda: self.send(grader))

    def send(self, grader: GraderProcess) -> None:
        try:
            grader.outbox = grader.outbox[os.write(grader.jobs, grader.outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it is dead, and will be reaped
            grader.outbox = memoryview(b"")
        if not grader.outbox:
            self.selector.unregister(grader.jobs)

    def read(self, grader: GraderProcess) -> bool:
        """Read what the grader wrote. Return whether there was anything."""
        try:
            data = os.read(grader.results, 2**16)
        except BlockingIOError:
            return False
        if not data:  # it died, or its scorer closed the pipe; its death tells which
            self.selector.unregister(grader.results)
            self.kill(grader)
        for line in _lines(grader.inbox, data):
            if not grader.ended:
                self.handle(grader, line[:1], line[1:])
        if len(grader.inbox) > LONGEST_LINE:
            self.end(grader, "crash", f"the scorer's result has more than {LONGEST_LINE} bytes")
        return True

    def handle(self, grader: GraderProcess, kind: bytes, body: bytes) -> None:
        """Act on a line of a grader."""
        if kind == grader_process.READY:
            grader.ready, grader.deadline = True, None
        elif grader.request is not None and not grader.started and kind == grader_process.STARTED:
            grader.started, grader.deadline = True, time.monotonic() + grader.request.seconds
        elif grader.request is not None and grader.started and kind in grader_process.REPLIES:
            self.answer(grader.request, "crash" if body.startswith(b'"') else "graded", body)
            grader.request = grader.deadline = None
            if kind == grader_process.LAST_REPLY:
                self.end(grader)
        else:
            self.end(grader, "crash", f"the grader wrote what is no message: {(kind + body)[:200]!r}")

    # -- ends --------------------------------------------------------------------------------------

    def expire(self) -> None:
        now = time.monotonic()
        for grader in list(self.graders.values()):
            if grader.deadline is None or now < grader.deadline:
                continue
            if grader.request is not None and grader.started:
                self.end(grader, "timeout", f"killed after {grader.request.seconds:g} s (reward_model.timeout_s)")
            elif grader.request is None and self.queue:
                self.answer(self.queue.popleft(), "crash", f"a grader was not ready after {START_S:g} s")
                self.end(grader)
            else:
                self.end(grader, "crash", f"no grader accepted the request after {TRIES} attempts")

    def end(self, grader: GraderProcess, status: str = "crash", detail: str = "") -> None:
        """Answer its request, or give it to another grader if it had not begun, and kill it with its session."""
        request, grader.request, grader.deadline, grader.ended = grader.request, None, None, True
        if request is not None:
            if grader.started or request.tries >= TRIES:
                self.answer(request, status, detail)
            else:
                self.queue.appendleft(request)
        self.kill(grader)

    def kill(self, grader: GraderProcess) -> None:
        # Both: it may not have its session yet. Neither id can be another's: it was not reaped.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(grader.pid, signal.SIGKILL)
        self.orphans_possible = True

    def reap(self) -> None:
        """Note who died: a grader's last lines are read, then its session is killed while it has its id."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if dead.si_pid in self.graders:
                    self.reap_grader(self.graders[dead.si_pid], dead)
                os.waitpid(dead.si_pid, 0)

    def reap_grader(self, grader: GraderProcess, dead: os.waitid_result) -> None:
        while grader.results in self.selector.get_map() and self.read(grader):
            pass
        if not grader.ended:
            number, by_signal = dead.si_status, dead.si_code != os.CLD_EXITED
            request = grader.request
            if by_signal and number == signal.SIGKILL and grader.started and request is not None and not request.begun:
                # Somebody killed it: another grades the request. Once, for the answer may have done it itself.
                request.begun, grader.started = True, False
            how = f"died of {SIGNALS.get(number, number)}" if by_signal else f"exited with status {number}"
            self.end(grader, "crash", f"the grader {how} before it returned a score")
        self.kill(grader)
        for fd in (grader.results, grader.jobs):
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            os.close(fd)
        del self.graders[grader.pid]

    def kill_orphans(self) -> None:
        """Kill the children that this process did not start: what a dead grader's scorers have left."""
        children = Path(f"/proc/self/task/{self.me}/children")  # Linux alone has it
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        orphans = [pid for pid in pids if pid not in self.graders]
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Their own children come to this process as they die: it looks again after the next death
        self.orphans_possible = bool(orphans) or any(grader.ended for grader in self.graders.values())

    def end_all(self) -> None:
        for grader in self.graders.values():
            self.kill(grader)
        give_up = time.monotonic() + 10.0
        while time.monotonic() < give_up:
            self.kill_orphans()
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            time.sleep(0.002)


def _lines(inbox: bytearray, data: bytes) -> list[bytes]:
    """Return the lines that ``data`` completes; the rest stays in ``inbox``."""
    if b"\n" not in data:  # the usual case of a long line: it is not searched again with every piece
        inbox += data
        return []
    *lines, rest = (bytes(inbox) + data).split(b"\n")
    inbox[:] = rest
    return lines


def main() -> None:
    with open(DRIVER_IN, "rb", buffering=0, closefd=False) as driver:  # unbuffered: it takes nothing after the line
        line = driver.readline()
    if not line:  # the driver is gone already
        return
    settings = json.loads(line)
    for function in settings["preload"]:
        load_object(function)()
    Supervisor(settings).run()


if __name__ == "__main__":
    main()
