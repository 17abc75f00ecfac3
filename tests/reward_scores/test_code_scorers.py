"""Scorers that run programs: what they read, how they compare, what they say of failures, what
configures them."""

from __future__ import annotations

import json
import math

import pytest

from core.config.composition import compose
from core.rewards.layer import scorer_options
from reward_scores import prime_code, sandbox_fusion, scorer_for, unit_tests
from reward_scores.sandbox.sandbox import SandboxUnavailable
from reward_scores.score import ScoreStatus
from reward_scores.unit_tests import BadTests, extract, read_tests, same_output, same_value

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def fenced(source: str, mark: str = "python") -> str:
    return f"So:\n```{mark}\n{source}\n```\n"


def test_the_program_in_a_response():
    for response, source in (
        (fenced("x = 1"), "x = 1"),
        (fenced("x = 1", "py"), "x = 1"),
        (fenced("x = 1", "Python3 title=a"), "x = 1"),
        (fenced("x = 1", ""), "x = 1"),
        (fenced("x = 1") + fenced("x = 2"), "x = 2"),
        (fenced("x = 1") + fenced("an output", ""), "x = 1"),
        (fenced("x = 1") + fenced("ls", "bash"), "x = 1"),
        ("1. do\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''"),
        ("```python\nx = 1", "x = 1"),
        (fenced("x = 1") + "```python\nx = ", "x = 1"),
        ("x = 1", "x = 1"),
        ("It is 1.", None),
        ("```python\n  x = 1\n```", "x = 1"),
        ("", None),
        (fenced("x = 1", "cpp"), None),
    ):
        assert extract(response) == source, response


def test_outputs_and_values_agree():
    for given, wanted in (
        *(("3", "3\n"), ("1 2\n3 \n\n", "1  2 3"), ("3.0000001", "3.0"), ("nan", "nan"), ("", "")),
        ("1e5", "100000.0"),
    ):
        assert same_output(given, wanted), (given, wanted)
    for given, wanted in (
        *(
            ("3.1", "3.0"),
            ("3.0", "3"),
            ("1000001", "1000000"),
            ("nan", "1.0"),
            ("2 1", "1 2"),
            ("1 2 3", "1 2"),
        ),
        *(("", "1"), ("yes", "YES")),
    ):
        assert not same_output(given, wanted), (given, wanted)
    for given, wanted in (
        *(
            ((1, (2,)), [1, [2]]),
            (3, [3]),
            (1.0, 1),
            (0.1 + 0.2, 0.3),
            ({1: "a"}, {"1": "a"}),
            (None, None),
        ),
    ):
        assert same_value(given, wanted), (given, wanted)
    for given, wanted in (
        *(
            ([3, 4], [3]),
            (3, [3, 4]),
            (True, 1),
            (1, True),
            ({1: "a", 2: "b"}, {"1": "a"}),
            ("1", 1),
            (1000000007.0, 1000000000),
        ),
        *((math.nan, 1.0), ({1, 2}, [1, 2])),
    ):
        assert not same_value(given, wanted), (given, wanted)


PAIRS = list(zip(SUM["inputs"], SUM["outputs"], strict=True))
TESTS = {
    "a mapping": SUM,
    "JSON": json.dumps(SUM),
    "with empty fields, as a table has them": {**SUM, "fn_name": None, "test_list": [], "test": ""},
    "a list of pairs": PAIRS,
    "a list of pairs as JSON": json.dumps(PAIRS),
    "a list of inputs and outputs": [{"input": given, "output": wanted} for given, wanted in PAIRS],
    "a list of numbers": [
        {"input": given, "output": int(wanted), "id": 1} for given, wanted in PAIRS
    ],
}


def test_where_tests_come_from():
    for name, tests in TESTS.items():
        assert (
            unit_tests.check_ground_truth(tests) is None is prime_code.check_ground_truth(tests)
        ), name
        assert list(sandbox_fusion.published_tests(tests, None)["inputs"]) == list(SUM["inputs"]), (
            name
        )
        assert unit_tests.score(fenced(ADD), tests).acc == 1, name
        assert unit_tests.score(fenced("print(0)"), tests).acc == 0, name
    assert unit_tests.score(fenced(ADD), None, {"test_cases": PAIRS}).acc == 1
    assert prime_code.score(fenced(ADD), None, {"test_cases": PAIRS}).acc == 1
    assert prime_code.score(fenced("print(0)"), PAIRS).acc == 0


def test_tests_that_are_none():
    for tests, problem in (
        *(("{", "no JSON"), ("", "no JSON"), ("3", "must be a mapping"), ([], "must be a mapping")),
        *(([["1", "2", "3"]], "must be a mapping"), ([{"input": "1"}], "must be a mapping")),
        (["1\n", "2\n"], "must be a mapping"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs"),
        ({"test": "def check(c): pass"}, "tests need"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "needs JSON"),
    ):
        with pytest.raises(BadTests, match=problem):
            read_tests(tests)
        assert problem in scorer_for("apps").check_ground_truth(tests), tests


def test_rewards_and_failures():
    half = unit_tests.score(fenced("print(3)"), SUM)
    assert (half.value, half.acc, half.status) == (0.5, 0.0, ScoreStatus.WRONG)
    assert unit_tests.score(fenced("print(3)"), SUM, continuous=False).value == 0
    assert unit_tests.score(fenced(ADD), SUM, continuous=False).value == 1
    broken = unit_tests.score(fenced(f"{ADD}\nif a == 3: 1 / 0"), SUM)
    assert (broken.value, broken.parts["error"], broken.parts["timeout"]) == (0.5, 0.5, 0.0)
    slow = unit_tests.score(fenced("while True: pass"), SUM, sandbox={"timeout_s": 0.2})
    assert (slow.value, slow.parts["timeout"], slow.status) == (0.0, 1.0, ScoreStatus.WRONG)
    assert unit_tests.score("none", SUM).parts.keys() == half.parts.keys()


CALLS = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}


@pytest.mark.parametrize("method", prime_code.METHODS)
def test_functions_are_called(method):
    for source in (
        "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b): return a + b",
    ):
        assert prime_code.score(fenced(source), CALLS, {}, method).value == 1
    assert prime_code.score(fenced("def add(a, b): return 3"), CALLS, {}, method).acc == 0


# --- published semantics beyond the vectors


def test_published_and_robust():
    for source, tests, value, robust in (
        ("x = 1", {"inputs": [], "outputs": []}, 1.0, None),
        ("print(3)", {"fn_name": "f", "inputs": ["1"], "outputs": ["3"]}, 1.0, 0.0),
        (
            "def f(x): return [3, 4]",
            {"fn_name": "f", "inputs": ["1"], "outputs": ["[[3, 4], 5]"]},
            1.0,
            0.0,
        ),
        ("print('2\\n\\n1.000001')", {"inputs": [""], "outputs": ["2\n1.0"]}, 1.0, 1.0),
        ("import sys\nprint(1)\nsys.exit(2)", {"inputs": [""], "outputs": ["1"]}, 1.0, 0.0),
        (
            "import sys\nprint(len(sys.stdin.buffer.read()))",
            {"inputs": ["abc"], "outputs": ["3"]},
            0.0,
            1.0,
        ),
        ("print(open(0).read())", {"inputs": ["abc"], "outputs": ["abc"]}, 0.0, 1.0),
        (
            "print(*sorted(input().split()))",
            {"inputs": ["b a"] * 12, "outputs": ["a b"] * 10 + ["x"] * 2},
            1,
            10 / 12,
        ),
        ("print(sqrt(int(input())))", {"inputs": ["4"], "outputs": ["2.0"]}, 1.0, 1.0),
    ):
        assert prime_code.score(fenced(source), tests).value == value, source
        if robust is not None:
            assert prime_code.score(fenced(source), tests, {}, "robust").value == pytest.approx(
                robust
            ), source


# --- configuration


def configured(*overrides):
    return compose("grpo", ["data.train_batch_size=1024", *overrides]).reward_model


def test_the_configuration_reaches_the_scorers():
    reward = configured("reward_model.sandbox.timeout_s=2", "reward_model.reward_manager=prime")
    sandbox = {
        "allow_unisolated": False,
        "timeout_s": 2.0,
        "memory_limit_mb": 1024,
        "total_timeout_s": 8.0,
    }
    assert scorer_options(reward) == {"prime_code": {"sandbox": sandbox}}
    json.dumps(scorer_options(reward))  # they are sent to workers
    reward = configured(
        "reward_model.sandbox_fusion.url=http://h/run_code",
        "reward_model.sandbox_fusion.max_concurrent=3",
    )
    fusion = scorer_options(reward)["prime_code"]["sandbox_fusion"]
    assert fusion == {"url": "http://h/run_code", "max_concurrent": 3, "memory_limit_mb": 1024}
    assert "total_timeout_s" not in scorer_options(configured())["prime_code"]["sandbox"]


def test_without_isolation_nothing_is_graded_unless_told(monkeypatch):
    from reward_scores.sandbox import sandbox

    none = sandbox.Isolation("none", False, ("nothing here",))
    monkeypatch.setattr(sandbox, "isolation", lambda: none)
    monkeypatch.setattr(unit_tests, "isolation", lambda: none)
    for scorer in (unit_tests, prime_code):
        with pytest.raises(SandboxUnavailable, match="nothing here"):
            scorer.score(fenced(ADD), SUM)
        assert scorer.score(fenced(ADD), SUM, sandbox={"allow_unisolated": True}).acc == 1
