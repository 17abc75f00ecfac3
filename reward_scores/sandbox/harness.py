"""The sandbox's first process: shuts itself in, then runs programs, each in a process forked from
it.

Started by ``reward_scores.sandbox`` with a description of the sandbox on standard input, followed
by requests; answers go to standard output, all of them lines of JSON. It imports nothing but the
standard library and its neighbours. The code it runs sees neither these pipes nor this process,
which it may not signal.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import io
import json
import math
import os
import resource
import selectors
import signal
import site
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import confine
import seccomp

PATIENCE = 5  # as in reward_scores.sandbox
_CHUNK = 1 << 16
_FILES = 256  # above every descriptor in use
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# The names that programs open; /proc, where they lead, is not there
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1}


def main() -> None:
    # No signal that a program could have sent here does anything; its own processes take signals
    # again
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    box = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = [os.path.realpath(path) for path in sys.path[1:]]
    confine.die_with_parent()
    shut_in = box["mode"] != "none"
    uid = confine.program_uid(box["mode"])
    if shut_in:
        confine.unshare(user=box["mode"] == "user_namespaces")
    if pid := os.fork():  # the child is the first process of the namespaces
        os.close(0)
        os.close(1)
        os.waitpid(pid, 0)
        os._exit(0)
    confine.die_with_parent()
    if shut_in:
        confine.enter_root(confine.readable(sys.path))
        confine.drop_privileges(uid)
        confine.die_with_parent()  # a change of user forgets it
    os.environ.clear()
    os.write(1, b'"ready"\n')
    _prepare_interpreter(box["prelude"])
    for line in sys.stdin.buffer:
        answer = memoryview(json.dumps(run(box, **json.loads(line))).encode() + b"\n")
        while answer:
            answer = answer[os.write(1, answer) :]


def _prepare_interpreter(prelude: str) -> None:
    """Complete the interpreter that every program starts from.

    ``site`` does not run here and would have made ``exit`` and ``quit``. The names that ``prelude``
    makes are found where a program has none of that name. Integers of any length are printed: a
    program's time is limited anyway.
    """
    site.setquit()
    site.sethelper()
    sys.set_int_max_str_digits(0)
    names: dict[str, Any] = {}
    exec(prelude, names)
    for name, value in names.items():
        vars(builtins).setdefault(name, value)


def run(
    box: dict[str, Any],
    source: str,
    name: str,
    stdin: str,
    seconds: float,
    end: float,
    output_bytes: int,
) -> dict[str, Any]:
    """Run a program; see :class:`reward_scores.sandbox.Ran` for the answer."""
    begun = time.monotonic()
    given = _input_file(stdin.encode("utf-8", "surrogateescape"))
    pipes = [os.pipe(), os.pipe()]
    ours = (pipes[0][0], pipes[1][0])
    theirs = (given, pipes[0][1], pipes[1][1])
    pid = os.fork()
    if pid == 0:
        _become(box, seconds, theirs, source, name)
    for number in theirs:
        os.close(number)
    ended = os.pidfd_open(pid)
    outputs = {number: bytearray() for number in ours}
    why = _collect(ended, outputs, end, output_bytes)
    for kill in (os.kill, os.killpg):  # the group: where no namespace ends what the program started
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    for number in (*ours, ended):
        os.close(number)
    used = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    # The kernel's limit ended it
    if why != "output" and (used >= seconds or code == -signal.SIGXCPU):
        why = "timeout"
    waited = (time.monotonic() - begun) / PATIENCE
    return {
        "status": why or ("ok" if code == 0 else "error"),
        "stdout": outputs[ours[0]].decode("utf-8", "replace"),
        "stderr": outputs[ours[1]][-2000:].decode("utf-8", "replace"),
        "exit_code": code,
        "seconds": seconds if why == "timeout" else max(used, waited),
    }


def _input_file(data: bytes) -> int:
    """Return a file in memory that holds these bytes and cannot be changed: programs read the size
    of their input."""
    number = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(number, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(number, 0, os.SEEK_SET)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
    return number


def _collect(ended: int, outputs: dict[int, bytearray], end: float, output_bytes: int) -> str:
    """Collect what a program writes until it has ended (returns an empty text) or a limit is
    reached."""
    poll = selectors.DefaultSelector()
    for number in outputs:
        os.set_blocking(number, False)
    for number in (*outputs, ended):
        poll.register(number, selectors.EVENT_READ)
    while (left := end - time.monotonic()) > 0:
        ready = {key.fd for key, _ in poll.select(left)}
        for number in ready & set(outputs):
            if not _read(number, outputs[number]):
                poll.unregister(number)
        if ended in ready:  # what it left in its pipes
            for number, data in outputs.items():
                while len(data) <= output_bytes and _read(number, data):
                    continue
        if any(len(data) > output_bytes for data in outputs.values()):
            return "output"
        if ended in ready:
            return ""
    return "timeout"


def _read(number: int, data: bytearray) -> bool:
    """Append what a pipe has; return False where there is nothing, now or any more."""
    try:
        piece = os.read(number, _CHUNK)
    except BlockingIOError:
        return False
    data += piece
    return bool(piece)


def _become(
    box: dict[str, Any], seconds: float, descriptors: tuple[int, ...], source: str, name: str
) -> NoReturn:
    """Be the program, with these descriptors as 0, 1 and 2 and no others; limits first."""
    code = 1
    try:
        os.setsid()
        confine.die_with_parent()
        for place, number in enumerate(descriptors):
            os.dup2(number, place)
        os.closerange(3, _FILES)
        confine.limit(
            box["memory_bytes"], max(1, math.ceil(seconds)), box["threads"], box["mode"] != "none"
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if box["seccomp"]:
            seccomp.install(os.getpid())
        code = _program(source, name)
    finally:
        os._exit(code)


def _program(source: str, name: str) -> int:
    """Run a script, as the module ``name``, on file descriptors 0, 1 and 2 and return its exit
    code."""
    sys.argv = ["program.py"]
    sys.stdin = sys.__stdin__ = os.fdopen(
        0, encoding="utf-8", errors="surrogateescape", closefd=False
    )
    sys.stdout = sys.__stdout__ = os.fdopen(
        1, "w", encoding="utf-8", errors="surrogateescape", closefd=False
    )
    sys.stderr = sys.__stderr__ = os.fdopen(
        2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1
    )
    _meet_expectations()
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = sys.argv[0]
    try:
        code = _exit_code(
            lambda: exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
        )
        for library, last in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
            if library in sys.modules:
                getattr(sys.modules[library], last)()
        # Which the interpreter's end would write out
        for stream in (*vars(module).values(), sys.__stdout__):
            if isinstance(stream, io.IOBase):
                with contextlib.suppress(Exception):
                    stream.flush()
        if not sys.stdout.closed:
            sys.stdout.flush()
    except (OSError, ValueError):  # its output is closed or too long
        return 1
    return code


def _meet_expectations() -> None:
    """Let a program ask for a larger stack than it gets, and open its streams by the names that
    they have in /dev."""
    set_limit = resource.setrlimit
    open_file = io.open

    def set_limit_or_not(which: int, limits: Any) -> None:
        with contextlib.suppress(
            *([ValueError, OSError] if which == resource.RLIMIT_STACK else [])
        ):
            set_limit(which, limits)

    @functools.wraps(open_file)
    def open_any(file: Any, *arguments: Any, **options: Any) -> Any:
        return open_file(_STREAMS.get(str(file), file), *arguments, **options)

    resource.setrlimit = set_limit_or_not
    io.open = builtins.open = open_any


def _exit_code(run: Callable[[], Any]) -> int:
    try:
        run()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 255
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        # The program's own failure, whatever it is, shown as the interpreter would show it
        sys.__excepthook__(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    main()
