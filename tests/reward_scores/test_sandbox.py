"""Programs that try to get out, to stay, to use up the machine, or to pass a test that they do not
pass."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from reward_scores.sandbox import sandbox
from reward_scores.sandbox.sandbox import (
    Isolation,
    Limits,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
)

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(seconds=3.0, memory_mb=256, output_bytes=1 << 16, threads=8)
MODES = {mode: Isolation(mode, True) for mode in sandbox.MODES}
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def nothing_is_left():
    """What outlives its parent comes to this process, and would be seen here."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = children(os.getpid())
    yield
    deadline = time.monotonic() + 5
    while children(os.getpid()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not children(os.getpid()) - before


def children(pid: int) -> set[int]:
    """Those that are not just waiting to be collected."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == pid and state not in "ZX":
                found.add(int(entry.name))
    return found


def descendants(pid: int) -> set[int]:
    below = children(pid)
    return below.union(*(descendants(child) for child in below))


@pytest.fixture(params=["best", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES)])
def how(request) -> Isolation:
    if request.param == "best":
        return sandbox.isolation()
    problem = sandbox.probe(MODES[request.param])
    if problem:
        pytest.skip(f"{request.param} is not to be had here: {problem}")
    return MODES[request.param]


@pytest.fixture
def box(how):
    with Sandbox(LIMITS, how) as made:
        yield made


WON = "print('WON')"
ESCAPES = {  # beside the ways of sandbox_probe.py
    "reads the repository": f"open({str(ROOT / 'pyproject.toml')!r}).read(); {WON}",
    "reads its own mounts": f"open('/proc/self/mounts').read(); {WON}",
    "kills everybody": f"import os; os.kill(-1, 9); {WON}",
    "has descriptors": (
        "import os\ndef is_open(n):\n    try: return bool(os.fstat(n))\n    except OSError: "
        "return False\n"
        f"if any(is_open(n) for n in range(3, 1000)): {WON}"
    ),
    "writes to the library": f"import os; open(os.path.dirname(os.__file__) + '/escape.py', "
    f"'w').write('x'); {WON}",
    "finds files where it is": f"import os\nif os.listdir('.'): {WON}",
}


def test_no_way_out(box):
    for name, source in ESCAPES.items():
        ran = box.run(source)
        assert "WON" not in ran.stdout, (name, ran)
        assert box.run("print(input())", "still here").stdout == "still here\n", name


USING_UP = {
    "loops for ever": ("while True: pass", "timeout"),
    "closes its output and stays": (
        "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(99)",
        "timeout",
    ),
    "ignores signals": (
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, "
        "signal.SIG_IGN)\ntime.sleep(99)",
        "timeout",
    ),
    "fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "timeout",
    ),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
        "args=(99,)).start()",
        None,
    ),
    "prints for ever": ("while True: print('x' * 1000)", "output"),
    "takes all memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "error"),
    "writes without end": ("f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 16))", "error"),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return repr([f]) + f([x])\nf(1)",
        None,
    ),
    "crashes": ("import ctypes; ctypes.string_at(0)", "error"),
    "hard exit": ("import os; os._exit(4)", "error"),
}


def test_it_ends_in_time(box):
    for name, (source, status) in USING_UP.items():
        start = time.monotonic()
        ran = box.run(source, seconds=0.3 if status == "timeout" else 1.0)
        assert ran.status == status or (status is None and ran.status != "ok"), (name, ran)
        assert time.monotonic() - start < 30, name  # a second and a half where the machine is free
        assert len(ran.stdout) <= LIMITS.output_bytes + (1 << 16), name
        assert box.run("print(1)").status == "ok", name


ORDINARY = {
    "input": ("a, b = map(int, input().split())\nprint(a + b)", "1 2\n", "3\n"),
    "deep in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()",
        "",
        "20000\n",
    ),
    "exit 0": ("print(1)\nexit = __import__('sys').exit\nexit(0)", "", "1\n"),
    "at exit": (
        "import atexit\natexit.register(lambda: print('end'))\nprint('start')",
        "",
        "start\nend\n",
    ),
    "unicode": ("print('\u00e9' + input())", "\u4e2d", "\u00e9\u4e2d\n"),
    "library": (
        "import heapq, decimal, fractions, bisect, itertools, zoneinfo, "
        "sqlite3\nprint(decimal.Decimal(1))",
        "",
        "1\n",
    ),
    "long input": ("import sys\nprint(len(sys.stdin.read()))", "x" * 3_000_000, "3000000\n"),
}


def test_what_ordinary_programs_do_works(box):
    for name, (source, stdin, stdout) in ORDINARY.items():
        ran = box.run(source, stdin)
        assert (ran.status, ran.stdout) == ("ok", stdout), (name, ran)


def test_the_same_program_prints_the_same(how):
    printed = set()
    for _ in range(2):
        with Sandbox(LIMITS, how) as box:
            printed.add(box.run("print([hash('a'), list({'ab', 'cd', 'ef', 'gh'})])").stdout)
    assert len(printed) == 1


def test_time_is_charged_by_what_a_program_does(box):
    assert box.run("import time\ntime.sleep(0.3)").seconds > 0.05  # a fifth of the wall
    before = box.charged
    ran = box.run("import time\nwhile True: time.sleep(0.01)", seconds=0.5)
    assert ran.status == "timeout" and ran.seconds >= 0.5
    assert box.charged == before + ran.seconds


def test_a_killed_scorer_leaves_nothing(how):
    source = (
        "from reward_scores.sandbox.sandbox import *\n"
        f"with Sandbox(Limits(seconds=99), Isolation({how.mode!r}, True)) as box:\n"
        "    print('running', flush=True)\n    box.run('while True: pass')"
    )
    scorer = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE)
    scorer.stdout.readline()
    deadline = time.monotonic() + 20
    # Launcher, first process, program
    while len(below := descendants(scorer.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(below) == 3
    scorer.kill()
    scorer.wait()
    scorer.stdout.close()
    while time.monotonic() < deadline and any(
        Path(f"/proc/{pid}/cmdline").exists() and alive(pid) for pid in below
    ):
        time.sleep(0.01)
    assert not any(alive(pid) for pid in below)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_sandbox_that_dies_is_an_error_and_no_verdict(how):
    with Sandbox(LIMITS, how) as box:
        os.kill(box._process.pid, signal.SIGKILL)
        box._process.wait()
        with pytest.raises(SandboxError):
            box.run("print(1)")


def test_without_isolation_no_program_runs(monkeypatch):
    monkeypatch.setattr(
        sandbox, "isolation", lambda: Isolation("none", False, ("namespaces: not permitted",))
    )
    with pytest.raises(
        SandboxUnavailable, match="allow_unisolated=True.*namespaces: not permitted"
    ):
        Sandbox()


@contextlib.contextmanager
def targets():
    """What the ways out of ``sandbox_probe.py`` try to reach: a file, sockets by port, path and
    name, and a process."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file, path, name = (
            f"{folder}/secret",
            f"{folder}/socket",
            f"rlrepro-{os.getpid()}-{os.urandom(8).hex()}",
        )
        Path(file).write_text("secret", encoding="utf-8")
        # Other users' programs may look: what keeps them out must be the sandbox
        os.chmod(folder, 0o755)
        os.chmod(file, 0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (path, f"\0{name}"):
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(address)
        os.chmod(path, 0o666)
        sleeps = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE
        )
        stack.callback(sleeps.communicate, b"\n")
        yield {
            "file": file,
            "port": tcp.getsockname()[1],
            "path": path,
            "name": name,
            "pid": sleeps.pid,
        }


def reached(how: Isolation) -> list[str]:
    """The ways of ``sandbox_probe.py`` that are open."""
    script = Path(__file__).with_name("sandbox_probe.py").read_text(encoding="utf-8")
    with targets() as given, Sandbox(Limits(), how) as box:
        ran = box.run(script, json.dumps(given))
    *ways, last = ran.stdout.split("\n")[:-1] or [""]
    assert last == "end", ran
    return ways


def test_every_way_out_is_shut_and_is_open_where_nothing_holds_a_program():
    everything = reached(Isolation("none", False))
    assert {"files outside", "network", "signals", "signals by descriptor", "priorities"} <= set(
        everything
    )
    assert len(everything) > 40 and sandbox.probe(Isolation("none", False), escapes=False) == ""
    assert "sockets" in sandbox.probe(Isolation("none", False))
    assert reached(sandbox.isolation()) == []


def test_system_calls_of_both_machines_are_told_apart(monkeypatch):
    """Two names with one number would allow what nobody named; the probe tries this machine's."""
    monkeypatch.syspath_prepend(str(Path(sandbox.__file__).parent))
    import seccomp

    calls = {**seccomp.ALLOWED, **{name: numbers for name, numbers, _ in seccomp.limited(7)}}
    for side in zip(*calls.values(), strict=True):
        known = [number for number in side if number >= 0]
        assert len(known) == len(set(known)) > 50
