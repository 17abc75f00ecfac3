"""Public code data: solutions of contest problems pass, and programs of other problems do not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reward_scores import prime_code

DATA = Path(os.environ.get("DATA_DIR") or "/no/such/folder")
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="DATA_DIR is not set to the folder of public data")
OPTIONS = {"timeout_s": 5.0, "total_timeout_s": 15.0}


# The contest sample has no reference solutions: these were written for it.
CONTESTS = {
    "Polycarp likes squares and cubes": (
        "n = int(input())\nfor _ in range(n):\n    x = int(input())\n"
        "    print(len({i * i for i in range(1, 31623) if i * i <= x} | {i**3 for i in range(1, 1001) if i**3 <= x}))"
    ),
    "A string is called square": (
        "for _ in range(int(input())):\n    s = input().strip()\n    h = len(s) // 2\n"
        "    print('YES' if len(s) % 2 == 0 and s[:h] == s[h:] else 'NO')"
    ),
    "Theofanis really likes sequences": (
        "for _ in range(int(input())):\n    n, k = map(int, input().split())\n    total, power = 0, 1\n"
        "    while k:\n        if k & 1:\n            total += power\n        power = power * n % (10**9 + 7)\n"
        "        k >>= 1\n    print(total % (10**9 + 7))"
    ),
    "Monocarp wrote down two numbers": (
        "for _ in range(int(input())):\n    (x, p), (y, q) = (map(int, input().split()) for _ in range(2))\n"
        "    a, b = len(str(x)) + p, len(str(y)) + q\n    m = min(p, q)\n"
        "    if a != b:\n        print('<' if a < b else '>')\n"
        "    else:\n        x, y = x * 10**(p - m), y * 10**(q - m)\n"
        "        print('<' if x < y else '>' if x > y else '=')"
    ),
    "Andi and Budi were given an assignment": (
        "n, m = map(int, input().split())\nrows = []\nfor i in range(n):\n    s = input()\n"
        "    rows.append((''.join(c if j % 2 == 0 else chr(155 - ord(c)) for j, c in enumerate(s)), i + 1))\n"
        "print(*(i for _, i in sorted(rows)))"
    ),
}


def contests() -> list[tuple[str, Mapping[str, Any]]]:
    problems = json.loads((DATA / "code_contests_sample" / "code_contests_test.json").read_text())
    found = []
    for start, source in CONTESTS.items():
        (tests,) = (problem["tests"] for problem in problems if start in problem["problem"][:300])
        found.append((source, {name: tests[name][:10] for name in ("inputs", "outputs")}))
    return found


@pytest.mark.parametrize("method", prime_code.METHODS)
def test_contest_problems(method):
    for source, tests in contests():
        score = prime_code.score(f"```python\n{source}\n```", json.dumps(tests), {}, method, sandbox=OPTIONS)
        assert score.value == 1, source
    for (source, _), (_, tests) in zip(contests(), contests()[1:], strict=False):  # another problem's program
        score = prime_code.score(f"```python\n{source}\n```", tests, {}, method, sandbox=OPTIONS)
        assert score.acc == 0, source
