"""Public code data: reference solutions pass, and programs that return nothing do not."""

from __future__ import annotations

import ast
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reward_scores import prime_code, unit_tests

DATA = Path(os.environ.get("DATA_DIR") or "/no/such/folder")
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="DATA_DIR is not set to the folder of public data")
QUICK = 12  # problems of each set in an ordinary run
OPTIONS = {"timeout_s": 5.0, "total_timeout_s": 15.0}


def humaneval() -> list[tuple[str, Mapping[str, Any]]]:
    with gzip.open(DATA / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    fields = ("prompt", "test", "entry_point")
    return [(row["prompt"] + row["canonical_solution"], {name: row[name] for name in fields}) for row in rows]


def mbpp() -> list[tuple[str, Mapping[str, Any]]]:
    rows = [json.loads(line) for line in (DATA / "mbpp" / "mbpp.jsonl").read_text().splitlines()]
    return [(row["code"], {name: row[name] for name in ("test_list", "test_setup_code")}) for row in rows]


SETS = {"humaneval": humaneval, "mbpp": mbpp}


def acc(source: str, tests: Mapping[str, Any]) -> float:
    return unit_tests.score(f"```python\n{source}\n```", tests, {}, sandbox=OPTIONS).acc


def failing(rows: list[tuple[str, Mapping[str, Any]]]) -> list[int]:
    return [number for number, (source, tests) in enumerate(rows) if acc(source, tests) != 1]


def without_results(source: str) -> str:
    """The program with every function returning nothing."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            node.value = None
    return ast.unparse(tree)


@pytest.mark.parametrize("name", SETS)
def test_references_pass_and_changed_ones_fail(name):
    rows = SETS[name]()[:: len(SETS[name]()) // QUICK]
    assert failing(rows) == []
    assert [number for number, (source, tests) in enumerate(rows) if acc(without_results(source), tests) == 1] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_humaneval():
    rows = humaneval()
    assert failing(rows) == []
    assert [number for number, (source, tests) in enumerate(rows) if acc(without_results(source), tests) == 1] == []


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
