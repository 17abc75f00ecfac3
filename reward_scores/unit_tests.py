"""Score programs by tests: standard input and output, or calls of a function.

The answer is the last closed block of Python code. It runs in :mod:`reward_scores.sandbox`; outputs
and results are compared here, where the program cannot reach.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_scores import prime_source
from reward_scores.sandbox.sandbox import (
    Isolation,
    Limits,
    Sandbox,
    isolation,
    required_isolation,
    unisolated,
)
from reward_scores.score import Score, as_text, graded, no_answer, plain

_MARK = "\n=> "  # in front of what a function returned
LONGEST_DICT = 1 << 18  # characters
# Characters of a returned value, besides LONGER times those of the wanted one: to parse 4 MB of
# small objects takes seconds, which nobody's deadline bounds. A right value is not LONGER: a
# float's text has at most 24 characters
SPARE_LENGTH = 1 << 16
LONGER = 32
# A function's arguments come as literals; what it returned is printed as one, of exact built-in
# types
_CALL = """

def _plain(value):
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
import sys as _sys
_value = _plain(FUNCTION(*eval(_sys.stdin.read(), {"nan": float("nan"), "inf": float("inf")})))
_sys.stdout.write("\\n=> " + repr(_value))
"""
MODULE = (
    # A function's program is loaded under this name: what it does as a script is left out, as
    # published
    "solution"
)
DIGITS = sys.int_info.default_max_str_digits
TOLERANCE = 1e-6  # of numbers that are not integers
_CODE = re.compile(
    r"^(?:import \w|from \w+ import |def \w+\(|class \w+[:(]|for \w.* in .*:|print\(|[\w, ]+=)",
    re.MULTILINE,
)
PYTHON = ("python", "python3", "py")
FAILURES = ("timeout", "error")  # parts of the score: shares of tests that ended so
_SUM = '{"inputs": ["1 2\\n", "-3 3\\n"], "outputs": ["3\\n", "0\\n"]}'
_CALLS = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}
EXAMPLES = (
    ("```python\nprint(sum(map(int, input().split())))\n```", _SUM, 1.0),
    ("```python\nprint(3)\n```", _SUM, 0.0),
    ("```python\ndef add(a, b):\n    return a + b\n```", _CALLS, 1.0),
    ("```python\ndef add(a, b):\n    return a - b\n```", _CALLS, 0.0),
    ("The sum.", _SUM, 0.0),
)


class BadTests(ValueError):
    """The tests cannot be read, so that no program can be scored."""


@dataclass(frozen=True)
class Tests:
    """The tests of a problem: ``inputs`` with ``outputs`` (calls of ``fn_name`` where it is
    set)."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    fn_name: str | None = None


@dataclass(frozen=True)
class SandboxOptions:
    """The section ``reward_model.sandbox``, and the time that an answer has."""

    allow_unisolated: bool = False
    timeout_s: float = 10.0  # of a test
    # of an answer, of processor time and on the wall; tests that have not run by then have failed
    total_timeout_s: float = 120.0
    memory_limit_mb: int = 1024

    def box(self) -> Sandbox:
        """Return a sandbox for one answer."""
        limits = Limits(seconds=self.timeout_s, memory_mb=self.memory_limit_mb)
        return Sandbox(limits, self.isolation(), self.total_timeout_s, prime_source.HEAD)

    def isolation(self) -> Isolation:
        if self.allow_unisolated and isolation().mode == "none":
            return unisolated()
        return required_isolation()


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    continuous: bool = True,
    sandbox: Mapping[str, Any] | None = None,
) -> Score:
    """Return the share of tests that pass or, with ``continuous`` False, 1 where all do. ``acc`` is
    1 where all do.

    Raises BadTests for tests that are none, SandboxUnavailable where programs cannot be isolated.
    """
    tests = read_tests(ground_truth, extra_info)
    source = extract(response)
    if source is None:
        return no_answer(**dict.fromkeys(FAILURES, 0.0))
    options = SandboxOptions(**(sandbox or {}))
    statuses = list(run_tests(source, tests, options, stop_early=not continuous))
    share = statuses.count("passed") / len(tests.inputs)
    parts = {name: statuses.count(name) / len(tests.inputs) for name in FAILURES}
    return graded(share == 1, source, share if continuous else float(share == 1), **parts)


def extract(response: str) -> str | None:
    """Return the last closed block marked as Python or, where there is none, the last closed one
    without a mark.

    Without either, a block marked as Python may be open to the end, and a response without fences
    is the program where a line of it looks like one.
    """
    found: dict[bool, str] = {}
    fence = ""
    mark = ""
    lines = []
    for line in response.splitlines():
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if not fence:
            if len(ticks) >= 3:
                fence = ticks
                lines = []
                mark = bare[len(ticks) :].strip().partition(" ")[0].lower()
        elif len(ticks) >= len(fence) and bare == ticks:
            if mark in (*PYTHON, ""):
                found[mark != ""] = _dedented(lines)
            fence = ""
        else:
            lines.append(line)
    if not found and fence and mark in PYTHON:
        return _dedented(lines)
    if "```" not in response and _CODE.search(response):
        return response
    return found.get(True, found.get(False))


def _dedented(lines: list[str]) -> str:
    source = "\n".join(lines)
    return textwrap.dedent(source) if source.lstrip("\n")[:1].isspace() else source


# --- tests


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> Tests:
    """Return the tests of a row: its ground truth or else ``extra_info["test_cases"]``. Raises
    BadTests."""
    given = (extra_info or {}).get("test_cases") if ground_truth is None else ground_truth
    if isinstance(given, (str, bytes)):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise BadTests(f"tests that are no JSON ({error}): {given[:100]!r}") from error
    given = as_columns(plain(given))
    if not isinstance(given, Mapping):
        raise BadTests(
            f"tests must be a mapping, a list of {{input, output}} or their JSON, got "
            f"{given!r:.100}"
        )
    if "inputs" not in given:
        raise BadTests(f"tests need inputs and outputs; got {', '.join(map(str, given))}")
    return _input_tests(given)


def as_columns(given: Any) -> Any:
    """Return a list of pairs, or of ``{input, output}``, as ``{inputs, outputs}``; anything else as
    it is.

    LiveCodeBench marks tests of a function, here ``fn_name``. The values that one takes and returns
    may stand there as such, as in APPS and TACO, and become JSON.
    """
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) and given:
        given = _columns(given)
    if not isinstance(given, Mapping) or not given.get("fn_name"):
        return given
    inputs, outputs = (plain(given.get(name, [])) for name in ("inputs", "outputs"))
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        return given
    lines = [
        "\n".join(map(json.dumps, each)) if isinstance(each, list | tuple) else each
        for each in inputs
    ]
    return {
        **given,
        "inputs": lines,
        "outputs": [each if isinstance(each, str) else json.dumps(each) for each in outputs],
    }


def _columns(tests: Sequence[Any]) -> Any:
    named = [isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests]
    pairs = [
        (test["input"], test["output"]) if named[at] else test for at, test in enumerate(tests)
    ]
    if not all(
        isinstance(pair, Sequence) and not isinstance(pair, (str, bytes)) and len(pair) == 2
        for pair in pairs
    ):
        return tests
    inputs, outputs = (
        [str(text) if isinstance(text, int | float) else text for text in side]
        for side in zip(*pairs, strict=True)
    )
    names = {_function(test) if isinstance(test, Mapping) else None for test in tests}
    if len(names) > 1:
        raise BadTests(
            "testtype must be functional, with one metadata.func_name, in all tests or in none"
        )
    return {"inputs": inputs, "outputs": outputs, "fn_name": names.pop()}


def _function(test: Mapping[str, Any]) -> str | None:
    """Return the name of the function that a test of LiveCodeBench calls; None where it runs a
    script."""
    if test.get("testtype") != "functional":
        return None
    about = test.get("metadata") or {}
    name = (json.loads(about) if isinstance(about, str) else about).get("func_name")
    if not name:
        raise BadTests("testtype=functional needs the name of the function in metadata.func_name")
    return name


def _input_tests(given: Mapping[str, Any]) -> Tests:
    inputs, outputs = (texts(plain(given.get(name, [])), name) for name in ("inputs", "outputs"))
    if len(inputs) != len(outputs) or not inputs:
        raise BadTests(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if not isinstance(given.get("fn_name"), str | None):
        raise BadTests(f"fn_name must be the name of a function, got {given['fn_name']!r:.100}")
    tests = Tests(inputs, outputs, given.get("fn_name"))
    if tests.fn_name:
        for text in (*tests.inputs, *tests.outputs):
            for line in text.split("\n") if text in tests.inputs else (text,):
                read_json(line)
    return tests


def texts(values: Any, field: str) -> tuple[str, ...]:
    """Return each value as text: a number as its text, a list as lines. Raises BadTests, with the
    field, for others."""
    if not isinstance(values, list | tuple):
        raise BadTests(f"{field} must be a list of texts, got {values!r:.100}")
    return tuple(_text(plain(value), f"{field}[{at}]") for at, value in enumerate(values))


def _text(value: Any, field: str) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(
            str(line) if isinstance(line, list | tuple) else _text(line, field) for line in value
        )
    text = str(value) if isinstance(value, bool) else as_text(value)
    if not isinstance(text, str):
        raise BadTests(f"{field} must be a text, a number, or a list of lines, got {value!r:.100}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise BadTests(
            f"{field} holds half of a surrogate pair, which no program can read: {text!r:.100}"
        )
    return text


def read_json(text: str) -> Any:
    """Return an argument or a result of a function. Raises BadTests."""
    try:
        with _digits(0):
            return json.loads(text)
    except ValueError as error:
        raise BadTests(
            f"fn_name needs JSON, an argument a line, and one value out: {text[:100]!r}"
        ) from error


@contextlib.contextmanager
def _digits(limit: int) -> Iterator[None]:
    """Let integers have as many digits, or any number with 0, while texts are read and written."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


# --- running them


def run_tests(
    source: str, tests: Tests, options: SandboxOptions, stop_early: bool = False
) -> Iterator[str]:
    """Yield each test's result: passed, wrong, error or timeout; fewer of them where
    ``stop_early``."""
    with options.box() as box:
        for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
            left = min(options.timeout_s, options.total_timeout_s - box.charged, box.left)
            if left <= 0:
                status = "timeout"
            elif tests.fn_name:
                arguments = [read_json(line) for line in given.split("\n")]
                status = call(
                    box, source, tests.fn_name, arguments, read_json(wanted), left, same_value
                )
            else:
                status = run(box, source, given, wanted, left, same_output)
            yield status
            if stop_early and status != "passed":
                return


def run(
    box: Sandbox,
    source: str,
    given: str,
    wanted: str,
    seconds: float,
    same: Callable[[str, str], bool],
) -> str:
    """Return the result of a script's test."""
    ran = box.run(source, given, seconds)
    if ran.status != "ok":
        return "timeout" if ran.status == "timeout" else "error"
    return "passed" if agrees(same, ran.stdout, wanted) else "wrong"


def call(
    box: Sandbox,
    source: str,
    name: str,
    arguments: Any,
    wanted: Any,
    seconds: float,
    same: Callable[[Any, Any], bool],
) -> str:
    """Return the result of a call of a function, in a program loaded anew, so that tests cannot
    lean on one another."""
    owner = "Solution()." if "class Solution" in source else ""
    with _digits(0):
        given = repr(arguments)
        size = len(repr(wanted))
    ran = box.run(source + _CALL.replace("FUNCTION", f"{owner}{name}"), given, seconds, MODULE)
    if ran.status != "ok":
        return "timeout" if ran.status == "timeout" else "error"
    _, mark, value = ran.stdout.rpartition(_MARK)
    if len(value) > SPARE_LENGTH + LONGER * size:
        return "wrong"
    # The hashes of a dictionary's keys may be chosen to collide: a large one could hold up the
    # grader
    if not mark or ("{" in value and len(value) > LONGEST_DICT):
        return "error"
    try:
        with _digits(max(size, DIGITS)):  # reading an integer takes the square of its length
            return "passed" if agrees(same, ast.literal_eval(value), wanted) else "wrong"
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):  # no value
        return "error"


# --- comparing


def agrees(same: Callable[[Any, Any], bool], given: Any, wanted: Any) -> bool:
    """Compare what a program gave; what cannot even be compared (a number too large to be a float)
    is not the same."""
    try:
        return same(given, wanted)
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError):
        return False


def same_output(given: str, wanted: str) -> bool:
    """Compare word by word, whatever the spaces between; numbers with a point or an exponent within
    TOLERANCE."""
    words = given.split()
    goal = wanted.split()
    return len(words) == len(goal) and all(
        a == b or _close(a, b) for a, b in zip(words, goal, strict=True)
    )


def _close(word: str, wanted: str) -> bool:
    if not any(mark in wanted for mark in ".eE") or len(word) > 400:
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def same_value(given: Any, wanted: Any) -> bool:
    """Compare with a value read from JSON: a tuple is a list, keys are texts, floats within
    TOLERANCE.

    A list of one element also stands for that element, as APPS writes its outputs.
    """
    if _equal(given, wanted):
        return True
    return isinstance(wanted, list) and len(wanted) == 1 and _equal(given, wanted[0])


def _equal(given: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
            return False
        return all(_equal(a, b) for a, b in zip(given, wanted, strict=True))
    if isinstance(wanted, dict):
        if not isinstance(given, dict) or len(given) != len(wanted):
            return False
        named = {str(key): value for key, value in given.items()}
        return all(key in named and _equal(named[key], value) for key, value in wanted.items())
    if isinstance(wanted, bool) or isinstance(given, bool):
        return given is wanted
    if isinstance(given, float) and isinstance(wanted, int):
        return given == wanted
    if isinstance(wanted, float):
        numbers = isinstance(given, (int, float))
        return numbers and math.isclose(given, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(given) is type(wanted) and given == wanted


def check_ground_truth(
    ground_truth: Any, continuous: bool = True, sandbox: Mapping[str, Any] | None = None
) -> str | None:
    """Return a problem, or None; no ground truth means tests in ``extra_info``, which is not seen
    here."""
    if ground_truth is None:
        return None
    try:
        read_tests(ground_truth)
    except BadTests as error:
        return str(error)
    return None
