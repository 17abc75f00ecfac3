"""Run untrusted Python where it can harm nothing, and report what it did.

A :class:`Sandbox` is one answer's: its own process tree, which ends with it. Every script, every program whose
functions are called and every judge of assertions is a process of its own in it, without environment, network, other
processes or files but the standard library, in an empty folder in memory, with limits of time, memory and output. What
a program is expected to print or return is never sent there, except to the judge, which the program cannot reach.

How it is shut in is found out by trying (:func:`isolation`): namespaces (with root's right to make them, or a user
namespace), else Landlock, and with either a filter of system calls (seccomp). What remains possible: using up its time
and memory, seeing which files exist (Landlock only), knowing its inputs, and with a bug in the kernel everything.

Whatever a program does is its own outcome: it fails, or its time is over. SandboxError means that the sandbox's own
processes failed, which a program can neither reach nor hold up.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from reward_scores.sandbox import plain
from reward_scores.sandbox.clock import PATIENCE

MODES = ("namespaces", "user_namespaces", "landlock")
START_SECONDS = 60.0  # to start a sandbox, on a machine under load
CLOSE_SECONDS = 2.0  # to end by itself
GRACE_SECONDS = 60.0  # after a process's own deadline, until the whole sandbox is killed: nothing is known then
_HARNESS = Path(__file__).with_name("harness.py")


class SandboxUnavailable(RuntimeError):
    """This machine offers no way to isolate a program."""


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program. ``seconds`` are a test's, as :class:`reward_scores.sandbox.clock.Clock` counts them."""

    seconds: float = 10.0
    memory_mb: int = 1024
    output_bytes: int = 1 << 22  # of standard output, and of standard error
    file_bytes: int = 1 << 24  # all files together
    threads: int = 32


@dataclass(frozen=True)
class Isolation:
    """The way programs are shut in: a mode, whether system calls are filtered, and why better ways were refused."""

    mode: str
    seccomp: bool
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.mode}{' with seccomp' if self.seccomp else ''}"

    @property
    def line(self) -> str:
        """One line for a start: what holds programs, or that nothing does."""
        if self.mode == "none":
            held = f"with this user's rights, {'under seccomp alone' if self.seccomp else 'held by nothing'}"
            return f"isolation: none; programs run {held}, since reward_model.sandbox.allow_unisolated=True"
        better = f" (refused here: {'; '.join(self.refused)})" if self.refused else ""
        return f"isolation: programs run in {self}{better}"


@dataclass(frozen=True)
class Ran:
    """A script's outcome. ``status`` is ok, error (its exit code is not 0), timeout or output (it wrote too much)."""

    status: str
    stdout: str
    stderr: str
    exit_code: int
    seconds: float  # that it is charged for


@dataclass(frozen=True)
class Called:
    """The outcome of a call. ``status`` is ok, raised, timeout or ended; ``value`` is built of exact built-in types."""

    status: str
    value: Any = None
    detail: str = ""


@dataclass(frozen=True)
class Tested:
    """The outcome of a test of assertions. ``status`` is passed, failed, raised, timeout or ended (the program did)."""

    status: str
    detail: str = ""


@dataclass(frozen=True)
class Opaque:
    """An object of the program that is no plain value; equal to nothing else."""

    number: int = field(compare=False)
    itself: object = field(default_factory=object, repr=False)


class Sandbox:
    """One sandbox, to be used in a ``with`` statement. Not for several threads.

    ``how`` is by default the best that :func:`isolation` finds. ``seconds`` are its life, on the wall: what a program
    has not done by then ends with status timeout. Raises SandboxUnavailable where there is no isolation, and
    SandboxError where the sandbox fails, which includes a start that takes half of its life. ``charged`` counts the
    seconds that programs took.
    """

    def __init__(self, limits: Limits | None = None, how: Isolation | None = None, seconds: float = math.inf):
        self.limits = limits or Limits()
        begun = time.monotonic()
        self.end = begun + seconds
        how = how or required_isolation()
        command = [os.path.realpath(sys.executable), "-s", "-S", "-X", "utf8", str(_HARNESS)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PYTHONHASHSEED": "0"},  # the same program gets the same score
            start_new_session=True,
        )
        self.charged = 0.0
        self._deadline = begun + min(START_SECONDS, seconds / 2)
        try:
            self._send(
                {
                    "mode": how.mode,
                    "seccomp": how.seccomp,
                    "memory_bytes": self.limits.memory_mb << 20,
                    "file_bytes": self.limits.file_bytes,
                    "threads": self.limits.threads,
                }
            )
            self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def left(self) -> float:
        """Seconds of its life that are left."""
        return self.end - time.monotonic()

    def close(self) -> None:
        """End the sandbox: its first process ends with the pipe of requests, and all others end with it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(SandboxError):
            self._read(1)  # until the pipe ends
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()

    def run(self, source: str, stdin: str = "", seconds: float | None = None) -> Ran:
        """Run a script in a new process."""
        request = {"source": source, "stdin": stdin, "output_bytes": self.limits.output_bytes}
        return Ran(**self._ask("run", seconds, **request))

    def load(self, source: str, seconds: float | None = None) -> Called:
        """Load a program whose functions :meth:`call` calls; it stays until the next one or until it fails."""
        return _called(self._ask("load", seconds, source=source))

    def call(self, name: str, *arguments: Any, seconds: float | None = None) -> Called:
        """Call a function of the program, or ``Class.method`` of a new object."""
        found = _called(self._ask("ask", seconds, request=["find", name, None]))
        if not isinstance(found.value, Opaque):
            return (
                Called("raised", detail=found.detail or f"{name} is not a function") if found.status == "ok" else found
            )
        encoded = plain.encode((arguments, {}), _refuse)
        return _called(self._ask("ask", seconds, request=["call", found.value.number, encoded]))

    def judge(
        self, source: str, tests: Sequence[str], names: Sequence[str], prelude: str = "", seconds: float | None = None
    ) -> list[Tested]:
        """Run tests made of assertions, in a process that reaches the program's ``names`` by calls only.

        What ``prelude`` defines under other names is the tests' own. The time limit is that of all tests together.
        """
        self._begin("judge", seconds, source=source)
        if self._receive() != "tests":
            raise SandboxError("the sandbox did not ask for the tests")
        self._send({"tests": list(tests), "names": list(names), "prelude": prelude})
        return [Tested(*each) for each in self._answer()]

    # --- the pipes

    def _ask(self, what: str, seconds: float | None, **request: Any) -> Any:
        self._begin(what, seconds, **request)
        return self._answer()

    def _answer(self) -> Any:
        answer, charged = self._receive()
        self.charged += charged
        return answer

    def _begin(self, what: str, seconds: float | None, **request: Any) -> None:
        seconds = self.limits.seconds if seconds is None else seconds
        end = min(time.monotonic() + PATIENCE * seconds, self.end)
        self._deadline = end + GRACE_SECONDS
        self._send({"do": what, "seconds": seconds, "end": end, **request})

    def _send(self, message: Any) -> None:
        data = plain.dumps(message)
        try:
            self._process.stdin.write(len(data).to_bytes(4, "big") + data)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SandboxError(f"the sandbox has ended: {self._last_words()}") from error

    def _receive(self) -> Any:
        return plain.loads(self._read(int.from_bytes(self._read(4), "big")))

    def _read(self, count: int) -> bytes:
        descriptor, data = self._process.stdout.fileno(), bytearray()
        while len(data) < count:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise SandboxError("the sandbox did not answer in time and was killed")
            piece = os.read(descriptor, min(count - len(data), 1 << 20))
            if not piece:
                raise SandboxError(f"the sandbox has ended: {self._last_words()}")
            data += piece
        return bytes(data)

    def _last_words(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ValueError):  # closed before
            lines = self._process.stderr.read(10_000).decode("utf-8", "replace").strip().splitlines()
            return lines[-1] if lines else "no reason given"
        return "it was closed"


def _called(reply: list[str]) -> Called:
    """Read the harness's word on a call: that the program sent a line, which may be anything, or that it did not."""
    status, line = reply
    if status != "sent":
        return Called(status)
    try:
        word, *rest = plain.loads_foreign(line.encode("latin-1"))
        if word == "ok":
            return Called("ok", plain.decode(rest[0], Opaque))
        return Called("raised", detail=": ".join(str(part)[:500] for part in rest))
    except (ValueError, LookupError, TypeError, MemoryError) as error:  # NotPlain among them
        return Called("ended", detail=f"it sent no value: {error}")


def _refuse(value: Any) -> int:
    raise TypeError(f"{type(value).__name__} cannot be passed to a program")


# --- what this machine offers


@functools.cache
def isolation() -> Isolation:
    """Return the best way to shut a program in on this machine. Each is tried with a program that tries to get out."""
    refused = []
    for mode in MODES:
        how = Isolation(mode, True, tuple(refused))
        problem = probe(how)
        if not problem:
            return how
        refused.append(f"{how}: {problem}")
    return Isolation("none", False, tuple(refused))


def required_isolation() -> Isolation:
    """Return :func:`isolation`. Raises SandboxUnavailable where there is none."""
    how = isolation()
    if how.mode == "none":
        raise SandboxUnavailable(
            "programs cannot be isolated here, so no code is run. Let the user make namespaces (container option "
            "--privileged or a seccomp profile with unshare), use a kernel with Landlock and seccomp, set "
            "reward_model.sandbox_fusion.url, or, for programs you trust, reward_model.sandbox.allow_unisolated=True. "
            f"Tried: {'; '.join(how.refused)}"
        )
    return how


def unisolated() -> Isolation:
    """Return no isolation but resource limits and, where there is one, the filter of system calls."""
    return Isolation("none", not probe(Isolation("none", True), escapes=False))


def probe(how: Isolation, escapes: bool = True) -> str:
    """Return why a program is not shut in this way, or an empty text. ``escapes`` False: only whether it runs.

    A program in the sandbox tries every way out of ``probe.py`` on a file, sockets and a process made for it here.
    """
    script = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    with targets() as given, contextlib.suppress(FileNotFoundError):
        try:
            with Sandbox(Limits(), how) as box:
                ran = box.run(script, json.dumps(given))
        except (SandboxError, OSError) as error:
            return str(error)
    *reached, last = ran.stdout.split("\n")[:-1] or [""]
    if last != "end":
        return f"the probe failed ({ran.status}): {ran.stderr.strip()[-300:]}"
    return f"a program reaches {', '.join(reached)}" if escapes and reached else ""


@contextlib.contextmanager
def targets() -> Iterator[dict[str, Any]]:
    """Make what a probe tries to reach: a file with a secret, sockets by port, path and name, and a process."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file, path, name = f"{folder}/secret", f"{folder}/socket", f"rlrepro-{os.getpid()}-{os.urandom(8).hex()}"
        Path(file).write_text("secret", encoding="utf-8")
        os.chmod(folder, 0o755)  # other users' programs may look: what keeps them out must be the sandbox
        os.chmod(file, 0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (path, f"\0{name}"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            server.bind(address)
        os.chmod(path, 0o666)
        port = tcp.getsockname()[1]
        sleeps = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        stack.callback(sleeps.communicate, b"\n")
        yield {"file": file, "port": port, "path": path, "name": name, "pid": sleeps.pid}


__all__ = [
    "Called",
    "Isolation",
    "Limits",
    "Opaque",
    "Ran",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailable",
    "Tested",
    "isolation",
    "probe",
    "required_isolation",
    "unisolated",
]
