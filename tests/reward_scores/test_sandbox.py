"""Programs that try to get out, to stay, to use up the machine, or to pass a test that they do not pass."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reward_scores import sandbox
from reward_scores.sandbox import Called, Isolation, Limits, Sandbox, SandboxError, SandboxUnavailable, plain

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(seconds=3.0, memory_mb=256, output_bytes=1 << 16, file_bytes=1 << 20, threads=8)
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
ESCAPES = {
    "reads a file of the system": f"open('/etc/passwd').read(); {WON}",
    "reads the repository": f"open({str(ROOT / 'pyproject.toml')!r}).read(); {WON}",
    "lists the repository": f"import os; os.listdir({str(ROOT)!r}); {WON}",
    "lists the homes": f"import os; os.listdir('/home'); {WON}",
    "reads another process": f"import os; open(f'/proc/{{os.getppid()}}/environ').read(); {WON}",
    "reads its own mounts": f"open('/proc/self/mounts').read(); {WON}",
    "TCP": f"import socket; socket.socket(); {WON}",
    "UDP": f"import socket; socket.socket(type=socket.SOCK_DGRAM); {WON}",
    "Unix socket": f"import socket; socket.socket(socket.AF_UNIX); {WON}",
    "fork": f"import os; os.fork(); {WON}",
    "vfork and exec": f"import subprocess, sys; subprocess.run([sys.executable, '-c', '']); {WON}",
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', \"print('WON')\"])",
    "posix_spawn": f"import os; os.posix_spawn('/bin/true', ['true'], {{}}); {WON}",
    "multiprocessing": (
        "import multiprocessing as m\n"
        f"def f(): pass\np = m.get_context('fork').Process(target=f); p.start(); p.join(); {WON}"
    ),
    "kills everybody": f"import os; os.kill(-1, 9); {WON}",
    "kills its parent": f"import os; os.kill(os.getppid(), 9); {WON}",
    "debugs its parent": (
        f"import ctypes, os\nlibc = ctypes.CDLL(None)\nif libc.ptrace(16, os.getppid(), None, None) == 0: {WON}"
    ),
    "makes namespaces": f"import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: {WON}",
    "mounts": f"import ctypes\nif ctypes.CDLL(None).mount(b'proc', b'/box', b'proc', 0, None) == 0: {WON}",
    "becomes root": f"import os; os.setuid(0); os.setgid(0); open('/etc/shadow').read(); {WON}",
    "outlives its parent": f"import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0: {WON}",
    "raises its limits": f"import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40)); {WON}",
    "has an environment": f"import os\nif os.environ: {WON}",
    "has descriptors": (
        "import os\ndef is_open(n):\n    try: return bool(os.fstat(n))\n    except OSError: return False\n"
        f"if any(is_open(n) for n in range(3, 1000)): {WON}"
    ),
    "writes outside": f"open('/tmp/rlrepro-escape', 'w').write('x'); {WON}",
    "writes to the library": f"import os; open(os.path.dirname(os.__file__) + '/escape.py', 'w').write('x'); {WON}",
    "shared memory": f"from multiprocessing import shared_memory as s; s.SharedMemory(create=True, size=9); {WON}",
    "finds files where it is": f"import os\nif os.listdir('.'): {WON}",
}


def test_no_way_out(box):
    for name, source in ESCAPES.items():
        ran = box.run(source)
        assert "WON" not in ran.stdout, (name, ran)
        assert not Path("/tmp/rlrepro-escape").exists(), name
        assert box.run("print(input())", "still here").stdout == "still here\n", name


USING_UP = {
    "sleeps for ever": ("import time\nwhile True: time.sleep(1)", "timeout"),
    "loops for ever": ("while True: pass", "timeout"),
    "closes its output and stays": ("import os, time\nfor n in range(3): os.close(n)\ntime.sleep(99)", "timeout"),
    "ignores signals": (
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(99)",
        "timeout",
    ),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    "thread that stays": ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()", "timeout"),
    "threads": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()", None),
    "prints for ever": ("while True: print('x' * 1000)", "output"),
    "complains for ever": ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "output"),
    "takes all memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "error"),
    "takes memory at once": ("x = bytearray(1 << 40)", "error"),
    "writes without end": ("f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 16))", "error"),
    "writes many files": ("for n in range(10**6): open(str(n), 'wb').write(bytes(1 << 16))", "error"),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return repr([f]) + f([x])\nf(1)", None),
    "crashes": ("import ctypes; ctypes.string_at(0)", "error"),
    "exit code": ("import sys; sys.exit(3)", "error"),
    "hard exit": ("import os; os._exit(4)", "error"),
    "not Python": ("def f(:", "error"),
    "tower": ("9**9**9**9", None),
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
    "stdin": ("import sys\nprint(sys.stdin.buffer.read().decode().upper())", "ab\nc", "AB\nC\n"),
    "no input": ("import sys\nprint(len(sys.stdin.readlines()))", "", "0\n"),
    "guard": ("def main():\n    print('x')\nif __name__ == '__main__':\n    main()", "", "x\n"),
    "deep in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()",
        "",
        "20000\n",
    ),
    "exit 0": ("print(1)\nexit = __import__('sys').exit\nexit(0)", "", "1\n"),
    "at exit": ("import atexit\natexit.register(lambda: print('end'))\nprint('start')", "", "start\nend\n"),
    "late thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print(1))).start()",
        "",
        "1\n",
    ),
    "unicode": ("print('\u00e9' + input())", "\u4e2d", "\u00e9\u4e2d\n"),
    "library": (
        "import heapq, decimal, fractions, bisect, itertools, zoneinfo, sqlite3\nprint(decimal.Decimal(1))",
        "",
        "1\n",
    ),
    "long input": ("import sys\nprint(len(sys.stdin.read()))", "x" * 3_000_000, "3000000\n"),
    "input that is not read": ("print(1)", "x" * 3_000_000, "1\n"),
    "order of sets": ("print(list({'a', 'b', 'c', 'd', 'e'}) == list({'a', 'b', 'c', 'd', 'e'}))", "", "True\n"),
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


def test_a_program_leaves_nothing_to_the_next(box):
    left = (
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.symlink('/', 'd')\nos.chmod('a/b', 0)\n"
        "for _ in range(30):\n    os.mkdir('y' * 250)\n    os.chdir('y' * 250)\n"  # longer than a path may be
        "os.chdir('/box')\nos.chmod('.', 0)"
    )
    box.run(left)
    assert box.run("import os\nprint(os.listdir('.'))").stdout in ("[]\n", "")  # Landlock: it cannot even look


def test_time_is_charged_by_what_a_program_does(box):
    assert box.run("import time\ntime.sleep(0.3)").seconds > 0.25
    before = box.charged
    assert box.run("import time\nwhile True: time.sleep(0.01)", seconds=0.5).status == "timeout"
    assert box.charged - before >= 0.5


PROGRAM = """
class Solution:
    def twice(self, x): return x * 2
class Odd:
    def __eq__(self, other): return True
    __hash__ = object.__hash__
def echo(*values, **named): return list(values) or named
def odd(): return Odd()
def fail(): raise KeyError("no")
def leave(): raise SystemExit(0)
def vanish():
    import os
    os._exit(0)
def wait():
    while True: pass
"""


def test_values_come_back_as_plain_data(box):
    assert box.load(PROGRAM) == Called("ok")
    values = (
        None,
        True,
        3,
        -(2**70),
        1.5,
        "a\ud800",
        b"x",
        [1, (2, {3}), frozenset("a")],
        {1: [2], (1,): 3},
        1j,
        range(2),
    )
    back = box.call("echo", *values).value
    assert back == list(values) and list(map(type, back)) == list(map(type, values))
    assert box.call("Solution.twice", "ab").value == "abab"
    assert box.call("echo", int).value == [int]
    assert box.call("odd").value != 0 and not isinstance(box.call("odd").value, (int, str))


def test_calls_that_give_no_value(box):
    ends = {"fail": "raised", "absent": "raised", "leave": "ended", "vanish": "ended", "wait": "timeout"}
    for name, status in ends.items():
        box.load(PROGRAM)
        assert box.call(name, seconds=0.3).status == status, name
        assert box.load(PROGRAM).status == "ok" and box.call("echo", 1).value == [1], name


TESTS = [
    "assert f(2) == 4",
    "assert f(3) == 9",
    "assert f(0) == 0 and f(1) is not None",
    "assert sorted([f(2), 1]) == [1, 4]",
]
CHEATS = {
    "exits when loaded": "import sys; sys.exit(0)",
    "exits hard when loaded": "import os; os._exit(0)",
    "exits when called": "def f(x): raise SystemExit(0)",
    "exits hard when called": "import os\ndef f(x): os._exit(0)",
    "equals everything": (
        "class A:\n    def __eq__(s, o): return True\n    __ne__ = __eq__\n    __hash__ = None\ndef f(x): return A()"
    ),
    "a number that equals everything": (
        "class A(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(x): return A(7)"
    ),
    "a text that equals everything": (
        "class A(str):\n    def __eq__(s, o): return True\n    __hash__ = None\ndef f(x): return A()"
    ),
    "a list that equals everything": "class A(list):\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "patches builtins": (
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.sorted = lambda *a: [1, 4]\n"
        "builtins.all = builtins.any = lambda *a: True\ndef f(x): return 7"
    ),
    "defines what tests use": "def sorted(x): return [1, 4]\ndef f(x): return 7",
    "patches the modules beside it": (
        "import sys\nfor m in list(sys.modules.values()):\n    for n in ('encode', 'decode', '_failure', 'loads'):\n"
        "        if hasattr(m, n): setattr(m, n, lambda *a: ['passed', ''])\ndef f(x): return 7"
    ),
    "writes verdicts to every descriptor": (
        "import os\nfor n in range(3, 64):\n"
        '    try: os.write(n, b\'["passed", ""]\\n\' * 9)\n    except OSError: pass\n'
        "def f(x): return 7"
    ),
    "answers for itself": ("import os\ndef f(x):\n    os.write(4, b'[\"ok\", true]\\n' * 9)\n    return 7"),
    "sends what is no value": "import os\nos.write(4, b'[' * 100000 + b'\\n')\ndef f(x): return 7",
    "sends too much": "import os\ndef f(x):\n    while True: os.write(4, b'x' * 65536)",
    "looks for the tests": (
        "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, (list, dict)) and 'f(2) == 4' in str(o):\n"
        "            return x * x\n    return 7"
    ),
    "walks up the stack": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'tests' in frame.f_locals: return x * x\n        frame = frame.f_back\n    return 7"
    ),
    "raises what a test raises": "def f(x): raise AssertionError",
    "never answers": "def f(x):\n    while True: pass",
    "is not there": "g = 1",
    "a value with every attribute": (
        "class A:\n    def __getattr__(s, n): return s\n    def __call__(s, *a): return s\ndef f(x): return A()"
    ),
}


def test_no_cheat_passes_a_test(box):
    for name, source in CHEATS.items():
        verdicts = box.judge(source, TESTS, ["f"], seconds=0.5)
        assert len(verdicts) == len(TESTS), name
        assert [verdict.status for verdict in verdicts].count("passed") == 0, (name, verdicts)
        honest = box.judge("def f(x): return x * x", TESTS, ["f"])
        assert [verdict.status for verdict in honest] == ["passed"] * len(TESTS), (name, honest)


def test_a_judge_handles_what_programs_have(box):
    source = (
        "import math\nclass Node:\n    def __init__(self, v): self.v, self.next = v, None\n"
        "def total(n): return n.v + (total(n.next) if n.next else 0)\ndef count(k):\n    yield from range(k)\n"
        "def bad(): raise ValueError('no')"
    )
    tests = [
        "a = Node(1); a.next = Node(2); assert total(a) == 3 and a.next.v == 2",
        "assert list(count(3)) == [0, 1, 2]",
        "assert math.isclose(total(Node(0.5)), 0.5)",
        "try:\n    bad()\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
        "assert total(Node(2)) == 3",
    ]
    statuses = [verdict.status for verdict in box.judge(source, tests, ["Node", "total", "count", "bad", "math"])]
    assert statuses == ["passed"] * 4 + ["failed"]


def test_what_the_prelude_defines_is_the_tests_own(box):
    prelude = "def helper(x): return x + 1\ndef f(x):\n    '''To be written.'''\n"
    cheat = prelude + "def helper(x): return 7\ndef f(x): return 7"
    assert box.judge(cheat, ["assert f(1) == helper(1)"], ["f"], prelude)[0].status == "failed"


def test_a_killed_scorer_leaves_nothing(how):
    source = (
        "from reward_scores.sandbox import *\n"
        f"with Sandbox(Limits(seconds=99), Isolation({how.mode!r}, True)) as box:\n"
        "    print('running', flush=True)\n    box.run('while True: pass')"
    )
    scorer = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE)
    scorer.stdout.readline()
    deadline = time.monotonic() + 20
    while len(below := descendants(scorer.pid)) < 3 and time.monotonic() < deadline:  # launcher, first process, program
        time.sleep(0.01)
    assert len(below) == 3
    scorer.kill()
    scorer.wait()
    scorer.stdout.close()
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}/cmdline").exists() and alive(pid) for pid in below):
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
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation("none", False, ("namespaces: not permitted",)))
    with pytest.raises(SandboxUnavailable, match="allow_unisolated=True.*namespaces: not permitted"):
        Sandbox()


def test_a_probe_sees_what_is_open():
    """Each way is open to a program that nothing holds, or that Landlock alone holds: the probe is no empty one."""
    everything = sandbox.probe(Isolation("none", False))
    ways = ("files outside", "network", "signals", "signals by descriptor", "priorities", "processors", "schedulers")
    for way in ways:
        assert way in everything.removeprefix("a program reaches ").split(", ")
    assert everything.count(",") > 50
    assert sandbox.probe(Isolation("none", False), escapes=False) == ""
    alone = sandbox.probe(Isolation("landlock", False)).removeprefix("a program reaches ").split(", ")
    if len(alone) > 1:  # where there is Landlock
        for way in (
            "owners of sockets",
            "owners of sockets by structure",
            "signals of sockets",
            "signals at input",
            "its parent's priority",
            "datagrams to a socket's path",
            "modes of files outside",
            "times of files outside",
        ):
            assert way in alone


@pytest.mark.parametrize("arch", [0, 1])
def test_the_filter_of_system_calls(monkeypatch, arch):
    """The instructions, run here: a call is allowed by its number and arguments, and no other one is."""
    monkeypatch.syspath_prepend(str(Path(sandbox.__file__).parent))
    import seccomp

    allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    calls = {**seccomp.ALLOWED, **seccomp.CHANGES, **{name: numbers for name, numbers, _ in seccomp.limited(7, True)}}
    for side in zip(*calls.values(), strict=True):
        known = [number for number in side if number >= 0]
        assert len(known) == len(set(known))

    def answer(name, *arguments, changes=False, machine=seccomp._AUDIT_ARCH[arch]):
        number = calls[name][arch] if name in calls else name
        words = [number, machine, 0, 0, *(part for one in arguments for part in (one & 0xFFFFFFFF, one >> 32))]
        return filtered(seccomp._filter(arch, 7, changes), words + [0] * 16)

    assert answer("read") == allow and answer("read", machine=0x40000003) == kill
    assert answer("chmod" if arch == 0 else "fchmodat") == absent
    assert answer("chmod" if arch == 0 else "fchmodat", changes=True) == allow
    assert answer(9999) == answer(0x40000000 + calls["read"][arch]) == answer("clone3") == absent
    thread = 0x3D0F00
    assert answer("clone", thread) == allow
    assert answer("clone", 17) == answer("clone", thread | 0x10000000) == refuse
    assert answer("kill", 7) == answer("kill", 7 | 1 << 32) == answer("tgkill", 7, 9, 2) == allow  # an int is 32 bits
    assert answer("kill", 1) == answer("kill", 0) == answer("kill", 2**64 - 1) == answer("tgkill", 1, 1) == refuse
    assert answer("fcntl", 3, 4, 0x800) == answer("fcntl", 3, 2, 1) == allow
    assert answer("fcntl", 3, 4, 0x2800) == answer("fcntl", 3, 8, 1) == answer("fcntl", 3, 10) == refuse
    assert answer("fcntl", 3, 6) == refuse and answer("fcntl", 3, 6, changes=True) == allow
    assert answer("ioctl", 0, 0x5401) == allow
    assert {answer("ioctl", 0, one) for one in (0x5412, 0x5452, 0x8901, 0x8902)} == {refuse}
    assert answer("prctl", 15) == allow and {answer("prctl", one) for one in (1, 4, 22, 36, 62)} == {refuse}
    assert answer("socketpair", 1, 0x80801) == allow
    assert answer("socketpair", 1, 2) == answer("socketpair", 1, 5) == answer("socketpair", 2, 1) == refuse
    assert answer("sendto", 3, 1, 1, 0, 0) == allow
    assert answer("sendto", 3, 1, 1, 0, 0x1000) == answer("sendto", 3, 1, 1, 0, 1 << 40) == refuse
    assert answer("prlimit64", 0, 7) == allow and answer("prlimit64", 8, 7) == refuse


def filtered(program, words):
    """Run a filter, as the kernel would, on a call given as 32-bit words: number, machine, address, arguments."""
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            value = words[operand // 4]
        elif code == 0x54:
            value &= operand
        elif code == 0x15:
            at += if_true if value == operand else if_false
        elif code == 0x05:
            at += operand
        else:
            assert code == 0x06
            return operand


def test_every_mode_that_runs_here_isolates_and_one_does():
    assert [mode for mode in MODES if "reaches" in sandbox.probe(MODES[mode])] == []
    assert sandbox.isolation().mode in sandbox.MODES, sandbox.isolation()


def test_what_is_no_value_is_refused():
    for message in (["h", "x"], ["q"], [], {"a": 1}, ["i", 3], ["s", ["l"]], ["d", 1], ["n", "print"]):
        with pytest.raises(plain.NotPlain):
            plain.decode(message, lambda number: number)
