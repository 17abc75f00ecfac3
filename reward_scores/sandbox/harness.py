"""The sandbox's first process: shuts itself in, then runs untrusted code in processes forked from it.

Started by ``reward_scores.sandbox`` with a description of the sandbox on standard input, followed by requests; answers
go to standard output, each message JSON behind its length. It imports nothing but the standard library and its
neighbours. The code it runs sees neither these pipes nor this process: another pid namespace's first process, or one
that it may not signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import child
import confine
import plain
import seccomp
from clock import Clock

_CONTROL_IN, _CONTROL_OUT = 0, 1
_CHUNK = 1 << 16
_FILES = 256  # above every descriptor in use
_OTHERS = 1000  # threads that the user's other processes may begin meanwhile


def read_message() -> Any:
    """Return the next message. Ends the process where there is none, since its owner has gone."""
    length = int.from_bytes(_read_exactly(4), "big")
    return plain.loads(_read_exactly(length))


def _read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(_CONTROL_IN, count - len(data))
        if not piece:
            confine.leave(0)
        data += piece
    return data


def send(message: Any) -> None:
    data = plain.dumps(message)
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(_CONTROL_OUT, data) :]


class Process:
    """A confined child. Its descriptors 0, 1, 2, ... are ``descriptors``; it has no others.

    Raises OSError where it cannot be made, and RuntimeError where it cannot be confined: ``work`` has not begun then.
    """

    def __init__(
        self, box: dict[str, Any], seconds: float, end: float, descriptors: list[int], work: Callable[[], int]
    ):
        confined, says_so = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _become(box, seconds, descriptors, says_so, work)
        finally:
            os.close(says_so)
            if getattr(self, "pid", None) is None:
                os.close(confined)
        ready = os.read(confined, 1)
        os.close(confined)
        self.ended = os.pidfd_open(self.pid)
        if not ready:
            self.stop()
            raise RuntimeError("a process could not be confined")
        self.clock = Clock(seconds, (self.pid,), end)

    def stop(self) -> int:
        """Kill it, and in a pid namespace all it left. Returns its wait status."""
        for kill, target in ((os.kill, self.pid), (os.killpg, self.pid)):
            try:
                kill(target, signal.SIGKILL)
            except OSError:  # it has ended already, or never led a group
                continue
        os.close(self.ended)
        return os.waitpid(self.pid, 0)[1]


def _become(
    box: dict[str, Any], seconds: float, descriptors: list[int], says_so: int, work: Callable[[], int]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        confine.die_with_parent()
        high = [os.dup2(number, _FILES // 2 + place) for place, number in enumerate([*descriptors, says_so])]
        for place, number in enumerate(high):
            os.dup2(number, place)
        os.closerange(len(high), _FILES)
        confine.limit(box["memory_bytes"], int(seconds) + 2, box["file_bytes"], box["threads"])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if box["seccomp"]:
            seccomp.install(os.getpid(), changes=box["mode"] != "landlock")
        os.write(len(descriptors), b".")
        os.close(len(descriptors))
        code = work()
    finally:
        confine.leave(code)


class Harness:
    def __init__(self, box: dict[str, Any]):
        self.box = box
        self.server: tuple[Process, int, int] | None = None
        self.charged = 0.0  # seconds, for the request being served
        self.folder: int | None = None  # that programs work in; where they can write nothing it cannot be listed
        with contextlib.suppress(OSError):
            self.folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def serve(self) -> NoReturn:
        while True:
            request, self.charged = read_message(), 0.0
            answer = getattr(self, "do_" + request.pop("do"))(**request)
            send([answer, self.charged])
            if not self.server:
                self._clean_up()

    def _clean_up(self) -> None:
        """End all processes and remove all files, so that none is left to the next program."""
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(OSError):
            if self.folder is not None:
                os.fchmod(self.folder, 0o700)  # a program may have taken away the right to enter it
                os.fchdir(self.folder)
                _empty_folder()

    # --- scripts

    def do_run(self, source: str, stdin: str, seconds: float, end: float, output_bytes: int) -> dict[str, Any]:
        """Run a script; see :class:`reward_scores.sandbox.Ran` for the answer."""
        self._stop_server()
        pipes = [os.pipe() for _ in range(3)]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        process = Process(self.box, seconds, end, theirs, lambda: child.become_program(source))
        for number in theirs:
            os.close(number)
        talk = _Talk(process, ours, stdin.encode("utf-8", "surrogateescape"), output_bytes)
        why = talk.go()
        status = process.stop()
        if not why:
            talk.drain()
            why = "output" if talk.too_long() else ""
        for number in talk.open:
            os.close(number)
        code, self.charged = os.waitstatus_to_exitcode(status), process.clock.used()
        return {
            "status": why or ("ok" if code == 0 else "error"),
            "stdout": bytes(talk.outputs[ours[1]]).decode("utf-8", "replace"),
            "stderr": bytes(talk.outputs[ours[2]][-2000:]).decode("utf-8", "replace"),
            "exit_code": code,
            "seconds": self.charged,
        }

    # --- functions

    def do_load(self, source: str, seconds: float, end: float) -> list[str]:
        self._stop_server()
        to_program, from_us = os.pipe()
        to_us, from_program = os.pipe()
        process = self._start_server(source, seconds, end, to_program, from_program)
        os.close(to_program)
        os.close(from_program)
        os.set_blocking(from_us, False)
        self.server = process, from_us, to_us
        return self._exchanged(b"", seconds, end)

    def do_ask(self, request: Any, seconds: float, end: float) -> list[str]:
        return self._exchanged(plain.dumps(request) + b"\n", seconds, end) if self.server else ["ended", ""]

    def _start_server(self, source: str, seconds: float, end: float, requests: int, answers: int) -> Process:
        def work() -> int:
            child.silence()
            child.Server(source, os.fdopen(3, "rb"), os.fdopen(4, "wb")).run()
            return 0

        return Process(self.box, seconds, end, [requests, requests, requests, requests, answers], work)

    def _exchanged(self, request: bytes, seconds: float, end: float) -> list[str]:
        """Send the program a request and return ``sent`` and its line, which is not read here, or why there is none.

        It may read as slowly as it likes, or never: nothing here waits for it but the clock.
        """
        process, to_program, answers = self.server
        clock, rest, data = Clock(seconds, (process.pid,), end), memoryview(request), bytearray()
        poll = _poll_of(answers)
        if rest:
            poll.register(to_program, select.POLLOUT)
        why = ""
        while not why and (rest or not data.endswith(b"\n")):
            ready = clock.poll(poll)
            why = "" if ready else "timeout"
            if to_program in ready:
                rest = _written(to_program, rest)
                if not rest:
                    poll.unregister(to_program)
            if answers in ready:
                piece = os.read(answers, _CHUNK)
                data += piece
                # An answer to half a question is none; what follows it would be taken for the next one
                if not piece or len(data) > plain.MAX_BYTES or (rest and data.endswith(b"\n")):
                    why = "ended"
        self.charged = clock.used()
        if why or data.count(b"\n") > 1:
            self._stop_server()
            return [why or "ended", ""]
        return ["sent", data.decode("latin-1")]

    def _stop_server(self) -> None:
        if self.server:
            process, *pipes = self.server
            process.stop()
            for number in pipes:
                os.close(number)
        self.server = None

    # --- assertions

    def do_judge(self, source: str, seconds: float, end: float) -> list[list[str]]:
        """Load the program, then request the tests, so that they do not exist where it runs."""
        self._stop_server()
        to_program, from_judge = os.pipe()
        to_judge, from_program = os.pipe()
        results, reports = os.pipe()
        program = self._start_server(source, seconds, end, to_program, from_program)
        os.close(to_program)
        os.close(from_program)
        send("tests")
        tests = read_message()

        def work() -> int:
            report = os.fdopen(5, "wb")
            child.silence()

            def say(message: Any) -> None:
                report.write(plain.dumps(message) + b"\n")
                report.flush()

            judge = child.Judge(child.Link(os.fdopen(3, "wb"), os.fdopen(4, "rb")), say)
            judge.run(tests["prelude"], tests["tests"], tests["names"])
            return 0

        descriptors = [to_judge, to_judge, to_judge, from_judge, to_judge, reports]
        try:
            judge = Process(self.box, seconds, end, descriptors, work)
        except OSError:  # the program may have taken all threads or memory; the tests then find that it has ended
            os.kill(program.pid, signal.SIGKILL)
            os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
            judge = Process(self.box, seconds, end, descriptors, work)
        for number in (from_judge, to_judge, reports):
            os.close(number)
        clock = Clock(seconds, (judge.pid, program.pid), end)
        found = _read_reports(results, len(tests["tests"]), clock)
        self.charged = clock.used()
        judge.stop()
        program.stop()
        os.close(results)
        return found


def _read_reports(descriptor: int, count: int, clock: Clock) -> list[list[str]]:
    data, why, poll = b"", "ended", _poll_of(descriptor)
    while data.count(b"\n") < count:
        if not clock.poll(poll):
            why = "timeout"
            break
        piece = os.read(descriptor, _CHUNK)
        if not piece:
            break
        data += piece
    found = [plain.loads(line) for line in data.split(b"\n")[:-1]]
    return found + [[why, ""]] * (count - len(found))


def _empty_folder() -> None:
    """Remove all in the working folder, step by step: a path may be longer than the kernel takes."""
    for name in os.listdir("."):
        if os.path.isdir(name) and not os.path.islink(name):
            os.chmod(name, 0o700)
            os.chdir(name)
            _empty_folder()
            os.chdir("..")
            os.rmdir(name)
        else:
            os.unlink(name)


def _poll_of(descriptor: int) -> select.poll:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(_CONTROL_IN, 0)  # hang-up only
    return poll


def _written(descriptor: int, rest: memoryview) -> memoryview:
    """Write what the pipe takes now and return what is left, of a pipe that nobody reads any more nothing."""
    try:
        return rest[os.write(descriptor, rest[:_CHUNK]) :]
    except BlockingIOError:
        return rest
    except OSError:
        return rest[:0]


class _Talk:
    """The exchange with a process: feeds it and collects what it writes, within bounds."""

    def __init__(self, process: Process, pipes: list[int], stdin: bytes, output_bytes: int):
        self.process, self.stdin, self.limit = process, memoryview(stdin), output_bytes
        self.outputs = {number: bytearray() for number in pipes[1:]}
        self.input, self.open = pipes[0], set(pipes)
        for number in pipes:
            os.set_blocking(number, False)

    def go(self) -> str:
        """Exchange until the process has ended (returns an empty text), its time is over or it has written too much."""
        poll = select.poll()
        for number in self.outputs:
            poll.register(number, select.POLLIN)
        poll.register(self.input, select.POLLOUT)
        poll.register(self.process.ended, select.POLLIN)
        poll.register(_CONTROL_IN, 0)
        while True:
            ready = self.process.clock.poll(poll)
            if not ready:
                return "timeout"
            for number in ready:
                if number == self.process.ended:
                    return ""
                if (self._write() if number == self.input else self._read(number) != 0) is False:
                    poll.unregister(number)
                    self.open.discard(number)
                    os.close(number)
            if self.too_long():
                return "output"

    def too_long(self) -> bool:
        return any(len(data) > self.limit for data in self.outputs.values())

    def drain(self) -> None:
        """Read what the ended process left in its pipes."""
        for number in self.open & set(self.outputs):
            while not self.too_long() and self._read(number):
                continue

    def _write(self) -> bool:
        self.stdin = _written(self.input, self.stdin)
        return bool(self.stdin)

    def _read(self, number: int) -> int | None:
        """Return how many bytes there were; None where there are none now, 0 where there will be none."""
        try:
            piece = os.read(number, _CHUNK)
        except BlockingIOError:
            return None
        self.outputs[number] += piece
        return len(piece)


def main() -> None:
    # No signal that a program could have sent here does anything; its own processes take signals again
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    box = read_message()
    sys.path[:] = [os.path.realpath(path) for path in sys.path[1:]]
    confine.die_with_parent()
    mode = box["mode"]
    paths = confine.readable(sys.path)
    uid = confine.program_uid(mode, paths)
    if mode in ("namespaces", "user_namespaces"):
        confine.unshare(mode == "user_namespaces")
    pid = os.fork()
    if pid:
        _supervise(pid)
    confine.die_with_parent()
    if uid == os.geteuid() and mode != "user_namespaces":  # other processes of the user count: these are room for some
        box["threads"] += confine.tasks(uid) + _OTHERS
    if mode in ("namespaces", "user_namespaces"):
        confine.enter_root(paths, box["file_bytes"], uid)
    else:
        confine.enter_vanished_folder()
        if mode == "landlock":
            confine.landlock(paths)
    if mode != "none":
        confine.drop_privileges(uid)
        confine.die_with_parent()  # a change of user forgets it
    os.environ.clear()
    send("ready")
    Harness(box).serve()


def _supervise(pid: int) -> NoReturn:
    """Wait for the first process of the namespaces, holding none of its pipes."""
    os.close(_CONTROL_IN)
    os.close(_CONTROL_OUT)
    os.waitpid(pid, 0)
    confine.leave(0)


if __name__ == "__main__":
    main()
