"""PRIME's code scorer: programs for contest problems, tested by standard input and output or by
calls of a function.

``published`` keeps verl's scores, mistakes included: a response without tests passes, outputs agree
in many ways, single tests of a function are run as if they were scripts, and only the first ten
count once one fails. The program does not run as published, where it could reach everything, but in
:mod:`reward_scores.sandbox`, and an answer has a time limit over all its tests. ``robust`` is
:mod:`reward_scores.unit_tests`. With ``sandbox_fusion`` programs run on that server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_scores import prime_source, unit_tests
from reward_scores import sandbox_fusion as fusion
from reward_scores.sandbox.sandbox import Sandbox
from reward_scores.score import Score, graded, no_answer, plain
from reward_scores.unit_tests import FAILURES, SandboxOptions

METHODS = ("published", "robust")
EXAMPLES = tuple(example for example in unit_tests.EXAMPLES if isinstance(example[1], str))
COUNTED = 10  # tests that count once one fails
# Published limits of a test: in the run of all tests, and alone
ALL_SECONDS = 5.0
ONE_SECONDS = 10.0
_PREPARE = (
    Path(prime_source.__file__).read_text(encoding="utf-8")
    + """
import json, sys
print(json.dumps(prepared(json.load(sys.stdin))))
"""
)
_READ = """
def _run(text, run=code):
    import builtins
    from unittest.mock import mock_open
    _sys.stdin, _sys.stdout = _io.StringIO(text), _streams[1]
    lines = iter(text.split("\\n"))
    _sys.stdin.readline = lambda *_: next(lines)
    _sys.stdin.readlines = lambda *_: text.split("\\n")
    _sys.stdin.read = lambda *_: text
    builtins.open = mock_open(read_data=text)
    try:
        run()
    except SystemExit:
        pass
_run(_streams[0].read())
"""


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "published",
    continuous: bool = True,
    sandbox: Mapping[str, Any] | None = None,
    sandbox_fusion: Mapping[str, Any] | None = None,
) -> Score:
    """Return 1 where all tests pass, else with ``continuous`` the share of the first ten;
    ``robust`` as ``unit_tests``.

    Raises UnboundLocalError, as published, for a failed test with ``continuous`` False and
    ``method`` published.
    """
    if method not in METHODS:
        raise ValueError(f"prime_code method={method!r}: must be one of {', '.join(METHODS)}")
    if sandbox_fusion and sandbox_fusion.get("url"):
        return fusion.score(
            response, ground_truth, extra_info, method, continuous, **sandbox_fusion
        )
    if method == "robust":
        return unit_tests.score(response, ground_truth, extra_info, continuous, sandbox)
    tests = published_tests(ground_truth, extra_info)
    if tests is None:
        return graded(False, None, **dict.fromkeys(FAILURES, 0.0))
    source = response.split("```python")[-1].split("```")[0]
    return _published(source, tests, continuous, SandboxOptions(**(sandbox or {})))


def published_tests(
    ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the tests as they stand, each a text; None where they cannot be read."""
    given = fusion.published_tests(ground_truth, extra_info)
    if given is None:
        return None
    return {
        **given,
        **{
            name: list(unit_tests.texts(plain(given[name]), name)) for name in ("inputs", "outputs")
        },
    }


def _published(
    source: str, tests: dict[str, Any], continuous: bool, options: SandboxOptions
) -> Score:
    end = options.total_timeout_s
    with options.box() as box:
        script = _script(box, source, bool(tests.get("fn_name")))
        if script is None:
            return no_answer(timeout=0.0, error=1.0)
        found = _run_all(box, source, script, tests, min(end, ALL_SECONDS + 1))
        share = float(all(status == "passed" for status in found.values()))
        if not share and continuous:
            found = _run_first(box, script, tests, {} if tests.get("fn_name") else found, end)
            share = list(found.values()).count("passed") / max(len(found), 1)
    if not share and not continuous:
        raise UnboundLocalError(
            "a test failed and prime_code has no score for it with continuous=False, as published"
        )
    statuses = list(found.values())
    parts = {name: statuses.count(name) / max(len(statuses), 1) for name in FAILURES}
    return graded(share == 1, source, share, **parts)


def _script(box: Sandbox, source: str, function: bool) -> str | None:
    """Return the answer as a script, by Python's parser in the sandbox; None for what is no
    Python."""
    read = box.run(_PREPARE, json.dumps(source), ALL_SECONDS)
    if read.status != "ok":
        return None
    script, is_script, is_module = json.loads(read.stdout)
    return script if is_script or (function and is_module) else None


def _run_all(
    box: Sandbox, source: str, script: str, tests: dict[str, Any], end: float
) -> dict[int, str]:
    """Run every test until one fails. Returns the tests' results by number."""
    found: dict[int, str] = {}
    function = tests.get("fn_name")
    inputs = tests["inputs"]
    outputs = tests["outputs"]
    if not inputs:
        status = box.run(prime_source.HEAD + source if function else script, "", ALL_SECONDS).status
        return {} if status == "ok" else {0: "timeout" if status == "timeout" else "error"}
    for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=False)):
        seconds = min(ALL_SECONDS, end - box.charged, box.left)
        if seconds <= 0:
            found[number] = "timeout"
        elif function:
            found[number] = _call(box, source, function, given, wanted, seconds)
        else:
            found[number] = _run(box, script, given, wanted, seconds)
        if found[number] != "passed":
            break
    return found


def _run_first(
    box: Sandbox, script: str, tests: dict[str, Any], known: dict[int, str], end: float
) -> dict[int, str]:
    """Run the first ten tests as scripts, with more time. Those that have ended already are not run
    again."""
    found = {
        number: status
        for number, status in known.items()
        if number < COUNTED and status != "timeout"
    }
    for number, (given, wanted) in enumerate(zip(tests["inputs"], tests["outputs"], strict=False)):
        if number < COUNTED and number not in found:
            left = min(ONE_SECONDS, end - box.charged, box.left)
            found[number] = _run(box, script, given, wanted, left) if left > 0 else "timeout"
    return found


def _run(box: Sandbox, script: str, given: Any, wanted: Any, seconds: float) -> str:
    given, wanted = (
        "\n".join(text) if isinstance(text, list) else str(text) for text in (given, wanted)
    )
    return unit_tests.run(box, script + _READ, given, wanted, seconds, same_output)


def _call(box: Sandbox, source: str, function: str, given: str, wanted: str, seconds: float) -> str:
    try:
        arguments = [unit_tests.read_json(line) for line in given.split("\n")]
        goal = unit_tests.read_json(wanted)
    except (ValueError, AttributeError):
        return "error"
    if arguments and isinstance(arguments[0], dict):
        arguments = [_whole_keys(arguments[0])]
    return unit_tests.call(
        box, prime_source.HEAD + source, function, arguments, goal, seconds, same_value
    )


def _whole_keys(value: dict[str, Any]) -> dict[Any, Any]:
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return value


def same_value(value: Any, goal: Any) -> bool:
    """Compare as published: a tuple is a list, and the first element of the wanted value is
    enough."""
    if isinstance(goal, dict):
        goal = [_whole_keys(goal)]
    elif isinstance(goal, list) and goal and isinstance(goal[0], dict):
        goal = [_whole_keys(goal[0])]
    if not _is_json(value):
        return False
    tuples = isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], tuple)
    rows = (
        [list(row) for row in value]
        if tuples and all(hasattr(row, "__iter__") for row in value)
        else None
    )
    value = list(value) if isinstance(value, tuple) else value
    first = goal[:1] if isinstance(goal, list) else []
    return value == goal or value in first or (rows is not None and rows in first)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # an object of the program among others
        return False
    return True


def same_output(stdout: str, wanted: str) -> bool:
    """Compare as published: without spaces around lines and empty lines, or by numbers within
    numpy's tolerance."""
    lines = stdout.splitlines()
    if wanted.strip() in (
        "\n".join(lines).strip(),
        "\n".join(line.strip() for line in lines).strip(),
    ):
        return True
    goal = [line.strip() for line in wanted.split("\n") if line]
    full = [line for line in lines if line]
    return lines == goal or full == goal or _same_numbers(full, goal)


def _same_numbers(given: Sequence[str], goal: Sequence[str]) -> bool:
    if len(given) != len(goal) or all(
        a.isdigit() and b.isdigit() for a, b in zip(given, goal, strict=True)
    ):
        return False
    try:
        pairs = [(float(a), float(b)) for a, b in zip(given, goal, strict=True)]
    except ValueError:
        return False
    return all(
        a == b or (math.isfinite(b) and abs(a - b) <= 1e-8 + 1e-5 * abs(b)) for a, b in pairs
    )


def check_ground_truth(
    ground_truth: Any,
    method: str = "published",
    continuous: bool = True,
    sandbox: Mapping[str, Any] | None = None,
    sandbox_fusion: Mapping[str, Any] | None = None,
) -> str | None:
    """Return a problem, or None, under both methods: a row without tests is a mistake in the
    data."""
    if method == "published" and not continuous:
        return (
            "method=published has no score for a failed test with continuous=False; set "
            "method=robust"
        )
    return unit_tests.check_ground_truth(ground_truth)
