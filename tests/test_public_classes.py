"""Files of the kinds that people write for verl load and score or play, or are refused with what to write instead."""

from __future__ import annotations

from functools import cache

import pytest

from tests.public_classes.cases import REWARDS, TOOLS, USERS
from tests.public_classes.outcomes import Outcome, outcome

KINDS = {"rewards": REWARDS, "tools": TOOLS, "interactions": USERS}
FILES = [(kind, number) for kind, cases in KINDS.items() for number in range(len(cases))]
NAMES = [f"{kind}/{KINDS[kind][number].path}" for kind, number in FILES]


@cache
def outcome_of(kind: str, number: int) -> Outcome:
    return outcome(KINDS[kind][number])


@pytest.mark.parametrize(
    ("kind", "number"), FILES, ids=[f"{kind}/{KINDS[kind][number].path}" for kind, number in FILES]
)
def test_a_file_ends_as_its_case_states(kind, number):
    case, end = KINDS[kind][number], outcome_of(kind, number)
    assert end.loads == end.plays == (case.refused is None), end.reason
    assert (case.refused or "") in end.reason


@pytest.mark.parametrize(("kind", "plays", "of"), [("rewards", 22, 25), ("tools", 9, 13), ("interactions", 5, 6)])
def test_the_share_of_files_that_score_or_play(kind, plays, of):
    ends = [outcome_of(kind, number) for number in range(len(KINDS[kind]))]
    assert len(ends) >= of and sum(end.plays for end in ends) >= len(ends) * plays / of
