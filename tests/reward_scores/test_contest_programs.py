"""Right programs of contests are right, however they end, read their input and write their
output."""

from __future__ import annotations

import json

import pytest

from reward_scores import prime_code, prime_source, unit_tests
from reward_scores.sandbox.sandbox import Limits, Sandbox

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
MAIN = "def main():\n    a, b = map(int, input().split())\n    print(a + b)\n"
SYS = "import sys\n"
BYTES = "a, b = map(int, data.split())\nprint(a + b)\n"
ENDINGS = {
    "exit()": f"{ADD}exit()",
    "exit(0)": f"{ADD}exit(0)",
    "quit()": f"{ADD}quit()",
    "quit in a branch": "a, b = map(int, input().split())\nif a < b:\n    print(a + b)\n    "
    "quit()\nprint(0)",
    "exit in main": f"{MAIN}    exit()\nif __name__ == '__main__':\n    main()",
    "sys.exit": f"{SYS}{ADD}sys.exit()",
    "sys.exit(0)": f"{SYS}{ADD}sys.exit(0)",
    "sys.exit of main": f"{SYS}{MAIN}sys.exit(main())",
    "raise SystemExit": f"{ADD}raise SystemExit",
    "raise SystemExit(0)": f"{ADD}raise SystemExit(0)",
    "os._exit behind a flush": f"import os, sys\n{ADD}sys.stdout.flush()\nos._exit(0)",
    "main without a guard": f"{MAIN}main()",
    "a class": "class A:\n    def run(self):\n        print(sum(map(int, "
    "input().split())))\nA().run()",
    "a thread": f"import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << "
    f"27)\n{MAIN}"
    "t = threading.Thread(target=main)\nt.start()\nt.join()",
    "a thread that nobody joins": f"import threading\n{MAIN}threading.Thread(target=main).start()",
    "exit in a thread": f"import threading\n{MAIN}    "
    f"exit()\nthreading.Thread(target=main).start()",
    "asyncio": f"import asyncio\n{MAIN.replace('def', 'async def')}asyncio.run(main())",
    "at exit": f"import atexit\n@atexit.register\n{MAIN}",
    "input until its end": "while True:\n    try:\n        a, b = map(int, input().split())\n"
    "    except EOFError:\n        break\n    print(a + b)",
    "a bare except": "try:\n    while 1: print(sum(map(int, input().split())))\nexcept: pass",
    "an open stream": f"out = open(1, 'w')\n{ADD.replace('print(a + b)', 'out.write(str(a + b))')}",
    "a closed stream": f"{SYS}{ADD}sys.stdout.close()",
    "no end of line": f"{SYS}a, b = map(int, input().split())\nsys.stdout.write(str(a + b))",
    "a limit of the stack": "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 40, "
    "-1))\n" + ADD,
    "recursion": f"{SYS}sys.setrecursionlimit(10**9)\ndef f(n): return n and 1 + f(n - "
    f"1)\nf(50000)\n{ADD}",
    "recursion without a limit": f"def f(n): return n and 1 + f(n - 1)\nf(20000)\n{ADD}",
    "cached recursion": f"from functools import cache\n@cache\ndef f(n): return n and 1 + f(n - "
    f"1)\nf(9000)\n{ADD}",
}
READING = {
    "sys.stdin.readline": f"{SYS}input = sys.stdin.readline\n{ADD}",
    "a lambda that strips": f"{SYS}input = lambda: sys.stdin.readline().rstrip()\n{ADD}",
    "sys.stdin.read": f"{SYS}data = sys.stdin.read()\n{BYTES}",
    "sys.stdin.buffer": f"{SYS}data = sys.stdin.buffer.read()\n{BYTES}",
    "sys.stdin.buffer.readline": f"{SYS}input = sys.stdin.buffer.readline\n{ADD}",
    "lines": f"{SYS}for line in sys.stdin:\n    print(sum(map(int, line.split())))",
    "readlines": f"{SYS}for line in sys.stdin.readlines():\n    print(sum(map(int, line.split())))",
    "lines until an empty one": f"{SYS}for x in iter(sys.stdin.readline, ''):\n    "
    f"print(sum(map(int, x.split())))",
    "a descriptor": f"data = open(0).read()\n{BYTES}",
    "a descriptor in bytes": f"data = open(0, 'rb').read()\n{BYTES}",
    "its name": f"data = open('/dev/stdin').read()\n{BYTES}",
    "its name as a path": f"import pathlib\ndata = pathlib.Path('/dev/stdin').read_text()\n{BYTES}",
    "its size": f"import os\ndata = os.read(0, os.fstat(0).st_size)\n{BYTES}",
    "its size behind a reader": f"import io, os\ninput = io.BytesIO(os.read(0, "
    f"os.fstat(0).st_size)).readline\n{ADD}",
    "os.read": f"import os\ndata = os.read(0, 10**7)\n{BYTES}",
    "a raw stream": f"import io\ndata = io.FileIO(0).readall()\n{BYTES}",
    "fileinput": "import fileinput\nfor line in fileinput.input():\n    print(sum(map(int, "
    "line.split())))",
    "an iterator": f"{SYS}it = iter(sys.stdin.read().split())\nprint(int(next(it)) + "
    f"int(next(it)))",
    "the next line": f"{SYS}input = iter(sys.stdin.read().splitlines()).__next__\n{ADD}",
    "the stream replaced": f"import io, sys\nsys.stdin = io.StringIO(sys.stdin.read())\n{ADD}",
    "a text on its bytes": f"import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\n{ADD}",
    "reconfigured": f"{SYS}sys.stdin.reconfigure(encoding='utf-8')\n{ADD}",
    "a file where there is one": f"import os, sys\nif os.path.exists('in.txt'):\n    sys.stdin = "
    f"open('in.txt')\n{ADD}",
    "a file or else": f"{SYS}try:\n    sys.stdin = open('input.txt')\nexcept FileNotFoundError:\n "
    f"   pass\n{ADD}",
    "by the environment": f"import os\nif os.environ.get('LOCAL'):\n    1 / 0\n{ADD}",
    "the folder of the program": f"import os\nos.path.dirname(os.path.abspath(__file__))\n{ADD}",
    "select": f"import select, sys\nselect.select([sys.stdin], [], [])\n{ADD}",
    "rewound": f"{SYS}sys.stdin.read()\nsys.stdin.seek(0)\n{ADD}",
    "PyRival's": """import os
from io import BytesIO, IOBase
class FastIO(IOBase):
    def __init__(self, file):
        self._fd = file.fileno()
        self.buffer = BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None
        self.newlines = 0
    def readline(self):
        while self.newlines == 0:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, 8192))
            self.newlines = b.count(b"\\n") + (not b)
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines -= 1
        return self.buffer.readline()
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.writable = self.buffer.writable
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
        self.readline = lambda: self.buffer.readline().decode("ascii")
import sys
sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)
input = lambda: sys.stdin.readline().rstrip("\\r\\n")
"""
    + ADD,
}
SUM = "sum(map(int, input().split()))"
WRITING = {
    "bytes": f"{SYS}sys.stdout.buffer.write(b'%d' % {SUM})",
    "os.write": f"import os\nos.write(1, b'%d' % {SUM})",
    "a replaced print": f"{SYS}print = lambda x: sys.stdout.write(f'{{x}}\\n')\nprint({SUM})",
    "kept until the end": "import atexit, io, sys\nbuffer = io.StringIO()\nsys.stdout = buffer\n"
    f"atexit.register(lambda: sys.__stdout__.write(buffer.getvalue()))\n{ADD}",
    "its name": f"{SYS}sys.stdout = open('/dev/stdout', 'w')\n{ADD}",
    "detached": f"import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\n{ADD}",
    "line buffering": f"{SYS}sys.stdout.reconfigure(line_buffering=True)\n{ADD}",
    "beside messages": f"{SYS}print('debug', file=sys.stderr)\n{ADD}",
    "joined": f"out = []\nout.append(str({SUM}))\nprint('\\n'.join(out))",
}
NAMES = {
    "future": f"from __future__ import annotations\n{ADD}",
    "math": f"math.floor(1.5)\n{ADD}",
    "Counter": f"Counter('aa')\n{ADD}",
    "List": f"def f(x: List[int]) -> Optional[int]: pass\n{ADD}",
    "modules": f"collections.deque(), heapq.heapify([]), itertools.count(), functools.reduce, "
    f"sys.maxsize\n{ADD}",
    "functions": f"defaultdict(int), deque(), sqrt(4), heappush([], 1), bisect_left([], 1), "
    f"gcd(4, 6)\n{ADD}",
    "a built-in function stays": "assert pow(3, 2, 5) == 4 and type(pow(2, 2)) is int and "
    "open.__name__ == 'open'\n" + ADD,
    "a name of its own": "count = repeat = e = 0\ndef gcd(a): return a\n" + ADD + "assert gcd(4) "
    "== 4 and e == 0",
    "stars": f"from math import *\nfrom collections import *\nfrom typing import *\n{ADD}",
    "a dataclass": f"from dataclasses import dataclass\n@dataclass\nclass P:\n    x: "
    f"'int'\nP(1)\n{ADD}",
    "carriage returns": ADD.replace("\n", "\r\n"),
    "indented": "    a, b = map(int, input().split())\n    print(a + b)",
    "long integers": f"str(10**4400), int('1' * 4400)\n{ADD}",
    "decimals": f"from decimal import *\ngetcontext().prec = 50\n{ADD}",
}


@pytest.fixture(scope="module")
def box():
    """One sandbox for all programs, as a run makes it for one answer."""
    with Sandbox(Limits(seconds=5), prelude=prime_source.HEAD) as made:
        yield made


@pytest.mark.parametrize(
    "programs", (ENDINGS, READING, WRITING, NAMES), ids=("end", "read", "write", "name")
)
def test_right_programs_pass(box, programs):
    failed = {}
    for name, program in programs.items():
        source = unit_tests.extract(f"```python\n{program}\n```")
        status = unit_tests.run(box, source, "1 2\n", "3\n", 5.0, unit_tests.same_output)
        if status != "passed":
            failed[name] = status, box.run(source, "1 2\n").stderr
    assert not failed


FUNCTIONAL = [
    {
        "input": "[1, 2]\n3",
        "output": "6",
        "testtype": "functional",
        "metadata": {"func_name": "total"},
    }
]
CALLED = (
    (
        "class Solution:\n    def total(self, nums: List[int], k: int) -> int:\n        return "
        "sum(nums) + k",
        FUNCTIONAL,
    ),
    ("def total(nums, k): return sum(Counter(nums).elements()) + k", FUNCTIONAL),
    (
        "def total(nums, k): return sum(nums) + k\nif __name__ == '__main__':\n    print(input())",
        FUNCTIONAL,
    ),
    (
        "def total(a): return a > 0",
        {"inputs": [[1], [-1]], "outputs": [[True], [False]], "fn_name": "total"},
    ),
    (
        "def total(a): return a > 0",
        {"inputs": ["1", "-1"], "outputs": [True, False], "fn_name": "total"},
    ),
    (
        "def total(a): return a * 2",
        {"inputs": [["1"], ["ab"]], "outputs": [["11"], ["abab"]], "fn_name": "total"},
    ),
    (
        "def total(a): return a * 10",
        {"inputs": ["1" * 4400], "outputs": ["1" * 4400 + "0"], "fn_name": "total"},
    ),
)
PRINTED = (
    ("print(int(input()) > 0)", {"inputs": ["1", "-1"], "outputs": [True, False]}),
    ("print(10**4400)", {"inputs": [""], "outputs": ["1" + "0" * 4400]}),
    (ADD + "exit()", {"inputs": ["1 2"], "outputs": ["3"]}),
)


@pytest.mark.parametrize("method", prime_code.METHODS)
def test_functions_and_values_of_any_kind_are_right_under_both_methods(method):
    # Published ones take longer
    for source, tests in (*CALLED, *PRINTED)[:: 1 if method == "robust" else 3]:
        tests = json.dumps(tests)
        assert prime_code.check_ground_truth(tests, method) is None
        assert prime_code.score(f"```python\n{source}\n```", tests, {}, method).acc == 1.0, source


def test_functional_tests_are_no_scripts_and_need_the_name_of_the_function():
    script = "import json\nnums = json.loads(input())\nk = int(input())\nprint(sum(nums) + k)"
    assert unit_tests.score(f"```python\n{script}\n```", FUNCTIONAL).acc == 0.0
    assert "metadata.func_name" in unit_tests.check_ground_truth(
        [{**FUNCTIONAL[0], "metadata": {}}]
    )
    mixed = [*FUNCTIONAL, {"input": "1", "output": "1", "testtype": "stdin"}]
    assert "testtype" in unit_tests.check_ground_truth(mixed)


def test_what_is_read_cannot_be_changed(box):
    source = (
        "import os\nfor act in (lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 1 << 30)):\n"
    )
    source += "    try:\n        act()\n    except OSError:\n        continue\n    print('changed')"
    assert box.run(source, "1 2").stdout == ""
