"""Every golden vector of every scorer that is here, answered exactly as published."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden_io import golden_dir, golden_files
from tests.golden_scorers import ANSWERS, ERRORS, ROBUST, departure, raw_cases


def vectors(only_recommended: bool = False) -> list[Any]:
    return [
        pytest.param(file, case, id=f"{file}-{number}-{case['name']}")
        for file in ANSWERS
        for number, case in enumerate(raw_cases(file))
        if "recommended" in case or not only_recommended
    ]


@pytest.mark.parametrize(("file", "case"), vectors())
def test_golden_published(file, case):
    reason = departure(file, case)
    if reason:
        pytest.skip(f"{case['name']}: {reason}")
    inputs, wanted = {**case["inputs"], **case.get("params", {})}, case["expected"]
    if set(wanted) == {"error"}:
        with pytest.raises(ERRORS):
            ANSWERS[file](inputs)
        return
    answer = ANSWERS[file](inputs)
    got = {field: answer.get(field, "<no such field here>") for field in wanted}
    assert got == wanted


@pytest.mark.parametrize(("file", "case"), vectors(only_recommended=True))
def test_golden_recommended(file, case):
    wanted = case["recommended"]
    value = wanted.get("score", wanted.get("result")) if isinstance(wanted, dict) else wanted
    assert ROBUST[file]({**case["inputs"], **case.get("params", {})}) == float(value)


def test_every_golden_file_of_scorers_is_compared():
    assert [file for file in golden_files() if file.startswith("reward_") and file not in ANSWERS] == []


def test_golden_vectors_are_here():
    """An empty folder must not look like a pass."""
    assert any(raw_cases(file) for file in ANSWERS), f"no vectors of scorers in {golden_dir()}"
