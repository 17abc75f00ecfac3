"""Score programs by tests: standard input and output, calls of a function, or assertions (HumanEval, MBPP).

The answer is the last closed block of Python code. It runs in :mod:`reward_scores.sandbox`; outputs and results are
compared here, and assertions in a process that the program cannot reach.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_scores.sandbox import Isolation, Limits, Sandbox, isolation, required_isolation, unisolated
from reward_scores.score import Score, as_text, graded, no_answer, plain

TOLERANCE = 1e-6  # of numbers that are not integers
PYTHON = ("python", "python3", "py")
FAILURES = ("timeout", "error")  # parts of the score: shares of tests that ended so
_SUM = '{"inputs": ["1 2\\n", "-3 3\\n"], "outputs": ["3\\n", "0\\n"]}'
_ASSERTED = {"test_list": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}
EXAMPLES = (
    ("```python\nprint(sum(map(int, input().split())))\n```", _SUM, 1.0),
    ("```python\nprint(3)\n```", _SUM, 0.0),
    ("```python\ndef add(a, b):\n    return a + b\n```", _ASSERTED, 1.0),
    ("```python\ndef add(a, b):\n    return a - b\n```", _ASSERTED, 0.0),
    ("The sum.", _SUM, 0.0),
)


class BadTests(ValueError):
    """The tests cannot be read, so that no program can be scored."""


@dataclass(frozen=True)
class Tests:
    """The tests of a problem: ``inputs`` with ``outputs`` (calls of ``fn_name`` where it is set), or ``asserts``.

    ``prelude`` is the code that an answer continues; ``names`` are the program's that the assertions use.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    fn_name: str | None = None
    asserts: tuple[str, ...] = ()
    prelude: str = ""
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.asserts) or len(self.inputs)


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
        return Sandbox(limits, self.isolation(), self.total_timeout_s)

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
    """Return the share of tests that pass or, with ``continuous`` False, 1 where all do. ``acc`` is 1 where all do.

    Raises BadTests for tests that are none, SandboxUnavailable where programs cannot be isolated.
    """
    tests = read_tests(ground_truth, extra_info)
    source = extract(response)
    if source is None:
        return no_answer(**dict.fromkeys(FAILURES, 0.0))
    options = SandboxOptions(**(sandbox or {}))
    statuses = list(run_tests(source, tests, options, stop_early=not continuous))
    share = statuses.count("passed") / len(tests)
    parts = {name: statuses.count(name) / len(tests) for name in FAILURES}
    return graded(share == 1, source, share if continuous else float(share == 1), **parts)


def extract(response: str) -> str | None:
    """Return the last closed block marked as Python or, where there is none, the last closed one without a mark."""
    found: dict[bool, str] = {}
    fence, mark, lines = "", "", []
    for line in response.splitlines():
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if not fence:
            if len(ticks) >= 3:
                fence, lines = ticks, []
                mark = bare[len(ticks) :].strip().partition(" ")[0].lower()
        elif len(ticks) >= len(fence) and bare == ticks:
            if mark in (*PYTHON, ""):
                found[mark != ""] = textwrap.dedent("\n".join(lines)) if line[:1].isspace() else "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    return found.get(True, found.get(False))


# --- tests


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> Tests:
    """Return the tests of a row: its ground truth or else ``extra_info["test_cases"]``. Raises BadTests."""
    given = (extra_info or {}).get("test_cases") if ground_truth is None else ground_truth
    if isinstance(given, (str, bytes)):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise BadTests(f"tests that are no JSON ({error}): {given[:100]!r}") from error
    given = as_columns(plain(given))
    if not isinstance(given, Mapping):
        raise BadTests(f"tests must be a mapping, a list of {{input, output}} or their JSON, got {given!r:.100}")
    present = {name: value for name, value in zip(given, map(plain, given.values()), strict=True) if _given(value)}
    if "inputs" in present:
        return _input_tests(present)
    if "test" in present and "entry_point" in present:
        source, entry = str(present["test"]), str(present["entry_point"])
        return _assertions([f"{source}\n\ncheck({entry})"], present.get("prompt", ""), (entry,))
    if "test_list" in present:
        setup = str(present.get("test_setup_code", ""))
        lists = {name: present.get(name, []) for name in ("test_list", "challenge_test_list")}
        asserts = [test for name, tests in lists.items() for test in texts(tests, name)]
        return _assertions([f"{setup}\n{test}" for test in asserts], "", ())
    raise BadTests(
        f"tests need inputs and outputs, test and entry_point, or test_list; got {', '.join(map(str, given))}"
    )


def as_columns(given: Any) -> Any:
    """Return a list of pairs, or of ``{input, output}``, as ``{inputs, outputs}``; anything else as it is."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or not given:
        return given
    pairs = [(test["input"], test["output"]) if _is_named(test) else test for test in given]
    if not all(isinstance(pair, Sequence) and not isinstance(pair, (str, bytes)) and len(pair) == 2 for pair in pairs):
        return given
    inputs, outputs = ([str(text) if _is_number(text) else text for text in side] for side in zip(*pairs, strict=True))
    return {"inputs": inputs, "outputs": outputs}


def _is_named(test: Any) -> bool:
    return isinstance(test, Mapping) and {"input", "output"} <= test.keys()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _given(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _input_tests(given: Mapping[str, Any]) -> Tests:
    inputs, outputs = texts(given["inputs"], "inputs"), texts(given.get("outputs", []), "outputs")
    if len(inputs) != len(outputs):
        raise BadTests(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if not isinstance(given.get("fn_name"), str | None):
        raise BadTests(f"fn_name must be the name of a function, got {given['fn_name']!r:.100}")
    tests = Tests(inputs, outputs, given.get("fn_name"))
    if tests.fn_name:
        for text in (*tests.inputs, *tests.outputs):
            for line in text.split("\n") if text in tests.inputs else (text,):
                _json(line)
    return tests


def texts(values: Any, field: str) -> tuple[str, ...]:
    """Return each value as text: a number as its text, a list as lines. Raises BadTests, with the field, for others."""
    if not isinstance(values, list | tuple):
        raise BadTests(f"{field} must be a list of texts, got {values!r:.100}")
    return tuple(_text(plain(value), f"{field}[{at}]") for at, value in enumerate(values))


def _text(value: Any, field: str) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(str(line) if isinstance(line, list | tuple) else _text(line, field) for line in value)
    text = as_text(value)
    if not isinstance(text, str):
        raise BadTests(f"{field} must be a text, a number, or a list of lines, got {value!r:.100}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise BadTests(f"{field} holds half of a surrogate pair, which no program can read: {text!r:.100}")
    return text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadTests(f"fn_name needs JSON, an argument a line, and one value out: {text[:100]!r}") from error


def _assertions(asserts: Sequence[str], prelude: str, entry: tuple[str, ...]) -> Tests:
    try:
        own = {name for name in _defined(ast.parse(prelude)) if name not in entry}
        used = {name for test in asserts for name in _free(ast.parse(test))}
    except SyntaxError as error:
        raise BadTests(f"tests that are no Python: {error}") from error
    # a program's own sum is tested only where a test uses nothing else of it: it must not replace the tests' own sum
    names = (used | set(entry)) - own
    names = names - set(dir(builtins)) or names
    return Tests(asserts=tuple(asserts), prelude=prelude, names=tuple(sorted(names)))


def _free(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _defined(tree)


def _defined(tree: ast.Module) -> set[str]:
    """Return the names that the module's top level gives a value."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and _is_stored(part)}
    return names


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


# --- running them


def run_tests(source: str, tests: Tests, options: SandboxOptions, stop_early: bool = False) -> Iterator[str]:
    """Yield each test's result: passed, wrong, error or timeout; fewer of them where ``stop_early``."""
    with options.box() as box:
        if tests.asserts:
            seconds = min(options.timeout_s * len(tests), options.total_timeout_s)
            tested = box.judge(program(source, tests.prelude), tests.asserts, tests.names, tests.prelude, seconds)
            results = {"passed": "passed", "failed": "wrong", "timeout": "timeout"}
            yield from (results.get(each.status, "error") for each in tested)
            return
        one = _run_call if tests.fn_name else _run_script
        for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
            left = min(options.timeout_s, options.total_timeout_s - box.charged, box.left)
            status = one(box, source, tests.fn_name, given, wanted, left) if left > 0 else "timeout"
            yield status
            if stop_early and status != "passed":
                return


def program(source: str, prelude: str) -> str:
    """Return the answer behind the code that it continues: indented lines are the rest of its last function."""
    if not prelude:
        return source
    first = next((line for line in source.split("\n") if line.strip()), "")
    return prelude + source if first[:1].isspace() else f"{prelude}\n\n{source}"


def _run_script(box: Sandbox, source: str, fn_name: None, given: str, wanted: str, seconds: float) -> str:
    ran = box.run(source, given, seconds)
    if ran.status != "ok":
        return "timeout" if ran.status == "timeout" else "error"
    return "passed" if agrees(same_output, ran.stdout, wanted) else "wrong"


def _run_call(box: Sandbox, source: str, fn_name: str, given: str, wanted: str, seconds: float) -> str:
    """Make the calls of one test in a program loaded anew, so that tests cannot lean on one another."""
    called = box.load(source, seconds)
    if called.status == "ok":
        called = box.call(_callable_name(source, fn_name), *map(_json, given.split("\n")), seconds=seconds)
    if called.status != "ok":
        return "timeout" if called.status == "timeout" else "error"
    return "passed" if agrees(same_value, called.value, _json(wanted)) else "wrong"


def _callable_name(source: str, fn_name: str) -> str:
    return f"Solution.{fn_name}" if "class Solution" in source else fn_name


# --- comparing


def agrees(same: Callable[[Any, Any], bool], given: Any, wanted: Any) -> bool:
    """Compare what a program gave; what cannot even be compared (a number too large to be a float) is not the same."""
    try:
        return same(given, wanted)
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError):
        return False


def same_output(given: str, wanted: str) -> bool:
    """Compare word by word, whatever the spaces between; numbers with a point or an exponent within TOLERANCE."""
    words, goal = given.split(), wanted.split()
    return len(words) == len(goal) and all(a == b or _close(a, b) for a, b in zip(words, goal, strict=True))


def _close(word: str, wanted: str) -> bool:
    if not any(mark in wanted for mark in ".eE") or len(word) > 400:
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def same_value(given: Any, wanted: Any) -> bool:
    """Compare with a value read from JSON: a tuple is a list, keys are texts, floats within TOLERANCE.

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
    if isinstance(given, float) and isinstance(wanted, (int, float)) or isinstance(wanted, float):
        numbers = isinstance(given, (int, float))
        return numbers and math.isclose(given, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(given) is type(wanted) and given == wanted


def check_ground_truth(
    ground_truth: Any, continuous: bool = True, sandbox: Mapping[str, Any] | None = None
) -> str | None:
    """Return a problem, or None; no ground truth means tests in ``extra_info``, which is not seen here."""
    if ground_truth is None:
        return None
    try:
        read_tests(ground_truth)
    except BadTests as error:
        return str(error)
    return None
