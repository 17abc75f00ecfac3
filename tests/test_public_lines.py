"""Published command lines compose, or are refused with an advice that leads to a run (see
tests/public_lines.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.public_lines import (
    ABSENT,
    COMPOSES,
    MENDED,
    OPEN,
    Line,
    command,
    composed,
    lines,
    verdict,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def ends(folder) -> dict[Line, tuple[str, list[str]]]:
    return {line: verdict(line, folder) for line in lines()}


def test_lines_whose_features_are_here_compose(ends):
    valid = [
        end
        for line, (end, _) in ends.items()
        if line.valid and line.recipe != "sft" and end != ABSENT
    ]
    # Three of them give a key two values
    assert len(valid) > 70 and valid.count(COMPOSES) >= 0.92 * len(valid)
    tuning = [end for line, (end, _) in ends.items() if line.recipe == "sft"]
    assert tuning.count(COMPOSES) >= 0.8 * len(tuning)


def test_an_advice_that_is_followed_ends_in_a_run(ends):
    unmended = [(line.script, problems) for line, (end, problems) in ends.items() if end == OPEN]
    # A variable without a value
    assert len(unmended) == 1 and unmended[0][1][0].startswith("$SAVE: "), unmended
    assert any(end == MENDED for end, _ in ends.values())


def test_a_problem_is_one_line_with_what_to_do(ends):
    for line, (_, problems) in ends.items():
        assert all("; " in problem and "\n" not in problem for problem in problems), line.script


def test_every_key_of_a_line_that_composes_is_set_read_or_listed(ends, folder):
    for line, (end, _) in ends.items():
        if end != COMPOSES:
            continue
        recipe, args = command(line, folder)
        found, _ = composed(recipe, args)
        accounted = found.given.keys() | found.read.keys() | found.unused.keys()
        for text in args:
            key = re.match(r"\+*([^=]*)=", text)
            if key and not text.startswith("--"):
                assert any(one == key[1] or one.startswith(f"{key[1]}.") for one in accounted), (
                    line.script,
                    text,
                )
        for key, (_, settings) in found.read.items():
            assert settings, key
