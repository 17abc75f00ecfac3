"""Every golden vector of every scorer that is here, answered exactly as published."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden_io import golden_dir, golden_files
from tests.golden_scorers import ANSWERS, ERRORS, ROBUST, departure, raw_cases


def problem_with(file: str, case: dict[str, Any]) -> str:
    """Return how the answer differs from the published one; nothing where it does not."""
    inputs, wanted = {**case["inputs"], **case.get("params", {})}, case["expected"]
    try:
        answer = ANSWERS[file](inputs)
    except ERRORS as error:
        return "" if set(wanted) == {"error"} else f"raised {error!r}"
    got = {field: answer.get(field, "<no such field here>") for field in wanted}
    return "" if got == wanted else f"got {got}, want {wanted}"


@pytest.mark.parametrize("file", ANSWERS)
def test_golden_published(file):
    cases = [(number, case) for number, case in enumerate(raw_cases(file)) if not departure(file, case)]
    problems = {f"{number} {case['name']}": problem_with(file, case) for number, case in cases}
    assert not {name: problem for name, problem in problems.items() if problem}
    assert cases, f"no vectors in {golden_dir()}: an empty folder must not look like a pass"


@pytest.mark.parametrize("file", ROBUST)
def test_golden_recommended(file):
    for case in raw_cases(file):
        if "recommended" in case:
            wanted = case["recommended"]
            value = wanted.get("score", wanted.get("result")) if isinstance(wanted, dict) else wanted
            assert ROBUST[file]({**case["inputs"], **case.get("params", {})}) == float(value), case["name"]


def test_every_golden_file_of_scorers_is_compared():
    assert [file for file in golden_files() if file.startswith("reward_") and file not in ANSWERS] == []
