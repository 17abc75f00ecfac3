"""The process between the driver and its grading workers: it starts them, counts their time, and kills them.

``python -m core.rewards.supervisor`` is started by :class:`core.rewards.pool.Pool` alone. It has one thread and grades
nothing. Its workers are forks of it, with the scorers already imported. Nothing outlives it or the driver:

* a worker that is ended is killed with its session; what has left that session (a daemon) is adopted by this process,
  which is a subreaper, and killed as a stranger among its children;
* the workers ask the kernel to be killed when this process dies;
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

from core.config.plugins import load_object
from core.rewards import worker

DRIVER_IN, DRIVER_OUT = 0, 1
START_S = 120.0  # for a worker to import the user's function, which is not the answer's time
TAKE_S = 5.0  # for a waiting worker to take what it is given
TRIES = 10  # workers that may die before they have begun a request
LOOK_S = 1.0  # how often this process looks whether its parent is still there
LONGEST_LINE = 64 * 2**20  # bytes of a worker's reply


class DriverGone(Exception):
    """Nobody reads any more."""


@dataclass
class Request:
    id: int
    seconds: float
    jobs: bytes
    tries: int = 0
    begun: bool = False  # by a worker that somebody else then killed


@dataclass(eq=False)
class Worker:
    pid: int
    jobs: int  # the ends of its pipes that are kept here
    results: int
    deadline: float | None  # of what it does now
    ready: bool = False
    ended: bool = False  # killed, its last request answered; not yet buried
    request: Request | None = None
    started: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    outbox: memoryview = field(default_factory=lambda: memoryview(b""))


class Keeper:
    """One loop over pipes, deadlines and deaths."""

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = settings
        self.me = os.getpid()
        self.workers: dict[int, Worker] = {}
        self.queue: deque[Request] = deque()
        self.inbox = bytearray()
        self.strangers_possible = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(DRIVER_IN, selectors.EVENT_READ, self.hear_driver)
        woken, wakes = os.pipe()
        for fd in (woken, wakes):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.stop)
        self.selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 4096))

    def run(self) -> None:
        """Until the driver is gone."""
        worker.prctl(worker.PR_SET_CHILD_SUBREAPER, 1)
        try:
            while os.getppid() == self.settings["driver"]:
                self.dispatch()
                for key, _ in self.selector.select(self.wait_s()):
                    if key.fd in self.selector.get_map():  # an event before it may have ended its worker
                        key.data()
                self.bury()
                self.expire()
                self.kill_strangers()
        except (DriverGone, BrokenPipeError):
            pass
        finally:
            self.end_all()

    def stop(self, *_: Any) -> None:
        raise DriverGone

    def wait_s(self) -> float:
        deadlines = [w.deadline for w in self.workers.values() if w.deadline is not None and not w.ended]
        return max(0.0, min([LOOK_S, *(deadline - time.monotonic() for deadline in deadlines)]))

    # -- the driver --------------------------------------------------------------------------------

    def hear_driver(self) -> None:
        data = os.read(DRIVER_IN, 2**20)
        if not data:
            raise DriverGone
        for line in _lines(self.inbox, data):
            number, _, rest = line.partition(b" ")
            if rest == b"-":
                self.queue = deque(request for request in self.queue if request.id != int(number))
            else:
                seconds, _, jobs = rest.partition(b" ")
                self.queue.append(Request(int(number), float(seconds), jobs))

    def answer(self, request: Request, status: str, body: bytes) -> None:
        rest = memoryview(b"%d %s %s\n" % (request.id, status.encode(), body))
        while rest:
            rest = rest[os.write(DRIVER_OUT, rest) :]

    def fail(self, request: Request, status: str, detail: str) -> None:
        self.answer(request, status, json.dumps(detail).encode())

    # -- workers -----------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Gives what waits to workers that wait, and starts workers while there is more, up to their number."""
        alive = [w for w in self.workers.values() if not w.ended]
        for idle in alive:
            if self.queue and idle.ready and idle.request is None:
                self.assign(idle, self.queue.popleft())
        starting, room = sum(not w.ready for w in alive), self.settings["num_workers"] - len(alive)
        for _ in range(min(room, len(self.queue) - starting)):
            try:
                self.start_worker()
            except OSError as error:  # no process or pipe is to be had
                self.fail(self.queue.popleft(), "crash", f"no worker could be started: {error}")

    def start_worker(self) -> None:
        jobs_out, jobs_in = os.pipe()
        results_out, results_in = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            for fd in (jobs_out, jobs_in, results_out, results_in):
                os.close(fd)
            raise
        if pid == 0:
            worker.become_worker(self.settings, jobs_out, results_in, self.me)
        os.close(jobs_out)
        os.close(results_in)
        for fd in (jobs_in, results_out):
            os.set_blocking(fd, False)
        new = Worker(pid, jobs_in, results_out, deadline=time.monotonic() + START_S)
        self.workers[pid] = new
        self.selector.register(results_out, selectors.EVENT_READ, lambda: self.hear(new))

    def assign(self, idle: Worker, request: Request) -> None:
        request.tries += 1
        idle.request, idle.started = request, False
        idle.deadline = time.monotonic() + TAKE_S
        idle.outbox = memoryview(request.jobs + b"\n")
        self.selector.register(idle.jobs, selectors.EVENT_WRITE, lambda: self.send(idle))

    def send(self, to: Worker) -> None:
        try:
            to.outbox = to.outbox[os.write(to.jobs, to.outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it is dead, and will be buried
            to.outbox = memoryview(b"")
        if not to.outbox:
            self.selector.unregister(to.jobs)

    def hear(self, one: Worker) -> None:
        try:
            data = os.read(one.results, 2**16)
        except BlockingIOError:
            return
        if not data:  # it died, or its scorer closed the pipe; its death says which
            self.selector.unregister(one.results)
            self.kill(one)
        for line in _lines(one.inbox, data):
            if not one.ended:
                self.take(one, line[:1], line[1:])
        if len(one.inbox) > LONGEST_LINE:
            self.end(one, "crash", f"the scorer's result has more than {LONGEST_LINE} bytes")

    def take(self, one: Worker, kind: bytes, body: bytes) -> None:
        if kind == worker.READY:
            one.ready, one.deadline = True, None
        elif kind == worker.UNFIT:
            if self.queue:
                self.answer(self.queue.popleft(), "crash", body)
            self.end(one)
        elif one.request is not None and not one.started and kind == worker.STARTED:
            one.started, one.deadline = True, time.monotonic() + one.request.seconds
        elif one.request is not None and one.started and kind in (worker.REPLY, worker.LAST_REPLY):
            self.answer(one.request, "crash" if body.startswith(b'"') else "graded", body)
            one.request = one.deadline = None
            if kind == worker.LAST_REPLY:
                self.end(one)
        else:
            self.end(one, "crash", f"the worker wrote what is no message: {(kind + body)[:200]!r}")

    # -- ends --------------------------------------------------------------------------------------

    def expire(self) -> None:
        now = time.monotonic()
        for one in list(self.workers.values()):
            if one.ended or one.deadline is None or now < one.deadline:
                continue
            if one.request is not None and one.started:
                self.end(one, "timeout", f"killed after {one.request.seconds:g} s (reward_model.timeout_s)")
            elif one.request is None and self.queue:
                self.fail(self.queue.popleft(), "crash", f"a worker was not ready to grade after {START_S:g} s")
                self.end(one)
            else:
                self.end(one, "crash", f"{TRIES} workers did not take the request")

    def end(self, one: Worker, status: str = "crash", detail: str = "") -> None:
        """Answers its request, or gives it to another worker if it had not begun, and kills it with its session."""
        request, one.request = one.request, None
        one.ended = True
        if request is not None:
            if one.started or request.tries >= TRIES:
                self.fail(request, status, detail)
            else:
                self.queue.appendleft(request)
        self.kill(one)

    def grade_again(self, one: Worker) -> None:
        """Somebody killed the worker: its request goes to another, once, for an answer may have done it itself."""
        if not one.request.begun:
            one.request.begun, one.started = True, False

    def kill(self, one: Worker) -> None:
        # Both: it may not have its session yet. Neither id can be another's: it was not buried.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(one.pid, signal.SIGKILL)
        self.strangers_possible = True

    def bury(self) -> None:
        """Takes note of the dead: a worker's last words are read, then its session is killed while it has its id."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if dead.si_pid in self.workers:
                    self.bury_worker(self.workers[dead.si_pid], dead)
                os.waitpid(dead.si_pid, 0)

    def bury_worker(self, one: Worker, dead: os.waitid_result) -> None:
        while one.results in self.selector.get_map() and _readable(one.results):
            self.hear(one)
        if not one.ended:
            by_signal = dead.si_code != os.CLD_EXITED
            if by_signal and dead.si_status == signal.SIGKILL and one.started and one.request is not None:
                self.grade_again(one)
            how = f"died of {_signal_name(dead.si_status)}" if by_signal else f"exited with status {dead.si_status}"
            self.end(one, "crash", f"the worker {how} before it gave a verdict")
        self.kill(one)
        for fd in (one.results, one.jobs):
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            os.close(fd)
        del self.workers[one.pid]

    def kill_strangers(self) -> None:
        """Kills the children that this process did not start: what a dead worker's scorers have left."""
        if not self.strangers_possible:
            return
        strangers = [pid for pid in _children() if pid not in self.workers]
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Their own children come to this process as they die: it looks again after the next death
        self.strangers_possible = bool(strangers) or any(one.ended for one in self.workers.values())

    def end_all(self) -> None:
        self.queue.clear()
        for one in self.workers.values():
            one.ended = True
            self.kill(one)
        give_up = time.monotonic() + 10.0
        while time.monotonic() < give_up:
            self.strangers_possible = True
            self.kill_strangers()
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            time.sleep(0.002)


def _lines(inbox: bytearray, data: bytes) -> list[bytes]:
    """The lines that ``data`` completes; the rest stays in ``inbox``."""
    if b"\n" not in data:  # the usual case of a long line: it is not searched again with every piece
        inbox += data
        return []
    *lines, rest = (bytes(inbox) + data).split(b"\n")
    inbox[:] = rest
    return lines


def _readable(fd: int) -> bool:
    with selectors.DefaultSelector() as one:
        one.register(fd, selectors.EVENT_READ)
        return bool(one.select(0))


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main() -> None:
    line = bytearray()
    while not line.endswith(b"\n"):  # byte by byte, so that nothing after the line is taken
        byte = os.read(DRIVER_IN, 1)
        if not byte:
            sys.exit(0)
        line += byte
    settings = json.loads(line)
    for function in settings["preload"]:
        load_object(function)()
    Keeper(settings).run()


if __name__ == "__main__":
    main()
