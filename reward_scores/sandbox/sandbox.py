"""Run untrusted Python where it can harm nothing, and report what it did.

A :class:`Sandbox` is one answer's: its own process tree, which ends with it. Every program is a
process of its own in it, without environment, network, other processes, or files but the standard
library, which it can only read, with limits of time, memory and output. It is shut in by namespaces
(with root's right to make them, or a user namespace) and a filter of system calls (seccomp). What a
program is expected to print is never sent there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MODES = ("namespaces", "user_namespaces")
START_SECONDS = 60.0  # to start a sandbox, on a machine under load
# After a program's own deadline, until the whole sandbox is killed: nothing is known then
GRACE_SECONDS = 60.0
# Times its limit of processor time that a program may last on the wall: others may hold the
# processor
PATIENCE = 5
_HARNESS = Path(__file__).with_name("harness.py")
# Prints which ways out are open; nothing that it tries does harm
_PROBE = """
import os, socket
def is_open(way):
    try:
        way()
    except OSError:
        return False
    return True
ways = {
    "files": lambda: open("/etc/passwd"),
    "new files": lambda: os.mkdir("new"),
    "/proc": lambda: os.listdir("/proc"),
    "sockets": socket.socket,
    "signals": lambda: os.kill(os.getppid() or -1, 0),
    "processes": lambda: os.fork() or os._exit(0),
}
print(", ".join(name for name, way in ways.items() if is_open(way)))
"""


class SandboxUnavailable(RuntimeError):
    """This machine offers no way to isolate a program."""


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program. ``seconds`` are processor time, and :data:`PATIENCE` times as much on
    the wall."""

    seconds: float = 10.0
    memory_mb: int = 1024
    output_bytes: int = 1 << 22  # of standard output, and of standard error
    threads: int = 32


@dataclass(frozen=True)
class Isolation:
    """The way programs are shut in: a mode, whether system calls are filtered, and why better ways
    were refused."""

    mode: str
    seccomp: bool
    refused: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """One line for a start: what holds programs, or that nothing does."""
        if self.mode == "none":
            held = (
                f"with this user's rights, "
                f"{'under seccomp alone' if self.seccomp else 'held by nothing'}"
            )
            return (
                f"isolation: none; programs run {held}, since "
                f"reward_model.sandbox.allow_unisolated=True"
            )
        return f"isolation: programs run in {self.mode} with seccomp"


@dataclass(frozen=True)
class Ran:
    """A program's outcome. ``status`` is ok, error (its exit code is not 0), timeout or output (it
    wrote too much)."""

    status: str
    stdout: str
    stderr: str
    exit_code: int
    seconds: float  # that it is charged for


class Sandbox:
    """One sandbox, to be used in a ``with`` statement. Not for several threads.

    ``how`` is by default the best that :func:`isolation` finds. ``seconds`` are its life, on the
    wall: what a program has not done by then ends with status timeout. Raises SandboxUnavailable
    where there is no isolation, and SandboxError where the sandbox fails, which includes a start
    that takes half of its life. ``charged`` counts the seconds that programs took. What
    ``prelude``, run once, imports or defines is there for a program that does not.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        how: Isolation | None = None,
        seconds: float = math.inf,
        prelude: str = "",
    ):
        self.limits = limits or Limits()
        self.charged = 0.0
        begun = time.monotonic()
        self.end = begun + seconds
        how = how or required_isolation()
        self._process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-s", "-S", "-X", "utf8", str(_HARNESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PYTHONHASHSEED": "0"},  # the same program gets the same score
            start_new_session=True,
        )
        box = {
            "memory_bytes": self.limits.memory_mb << 20,
            "threads": self.limits.threads,
            "prelude": prelude,
        }
        try:
            self._ask(
                {"mode": how.mode, "seccomp": how.seccomp, **box},
                begun + min(START_SECONDS, seconds / 2),
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def left(self) -> float:
        """Seconds of its life that are left."""
        return self.end - time.monotonic()

    def close(self) -> None:
        """Kill the sandbox: all its processes end with the first one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def run(
        self, source: str, stdin: str = "", seconds: float | None = None, name: str = "__main__"
    ) -> Ran:
        """Run a program, as the module ``name``, in a new process."""
        seconds = self.limits.seconds if seconds is None else seconds
        end = min(time.monotonic() + PATIENCE * seconds, self.end)
        request = {
            "source": source,
            "name": name,
            "stdin": stdin,
            "output_bytes": self.limits.output_bytes,
        }
        ran = Ran(**self._ask({**request, "seconds": seconds, "end": end}, end + GRACE_SECONDS))
        self.charged += ran.seconds
        return ran

    def _ask(self, message: Any, deadline: float) -> Any:
        """Send a line of JSON and return the one that comes back. Raises SandboxError."""
        descriptor = self._process.stdout.fileno()
        reply = bytearray()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        while not reply.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise SandboxError("the sandbox did not answer in time and was killed")
            if not (piece := os.read(descriptor, 1 << 20)):
                said = (
                    self._process.stderr.read(10_000)
                    .decode("utf-8", "replace")
                    .strip()
                    .splitlines()
                )
                raise SandboxError(
                    f"the sandbox has ended: {said[-1] if said else 'no reason given'}"
                )
            reply += piece
        return json.loads(reply)


@functools.cache
def isolation() -> Isolation:
    """Return the best way to shut a program in on this machine. Each is tried with a program that
    tries to get out."""
    refused = []
    for mode in MODES:
        if not (problem := probe(Isolation(mode, True))):
            return Isolation(mode, True, tuple(refused))
        refused.append(f"{mode}: {problem}")
    return Isolation("none", False, tuple(refused))


def required_isolation() -> Isolation:
    """Return :func:`isolation`. Raises SandboxUnavailable where there is none."""
    how = isolation()
    if how.mode == "none":
        raise SandboxUnavailable(
            "programs cannot be isolated here, so no code is run. Let the user make namespaces "
            "(container option "
            "--privileged or a seccomp profile with unshare), set "
            "reward_model.sandbox_fusion.url, or, for programs "
            f"you trust, reward_model.sandbox.allow_unisolated=True. Tried: "
            f"{'; '.join(how.refused)}"
        )
    return how


def unisolated() -> Isolation:
    """Return no isolation but resource limits and, where there is one, the filter of system
    calls."""
    return Isolation("none", not probe(Isolation("none", True), escapes=False))


def probe(how: Isolation, escapes: bool = True) -> str:
    """Return why a program is not shut in this way, or an empty text. ``escapes`` False: only
    whether it runs."""
    try:
        with Sandbox(Limits(), how) as box:
            ran = box.run(_PROBE)
    except (SandboxError, OSError) as error:
        return str(error)
    if ran.status != "ok":
        return f"a program fails ({ran.status}): {ran.stderr.strip()[-300:]}"
    return f"a program reaches {ran.stdout.strip()}" if escapes and ran.stdout.strip() else ""
