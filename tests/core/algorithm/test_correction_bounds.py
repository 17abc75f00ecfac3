"""Thresholds of the rollout correction that cannot be meant are refused before a model loads."""

from __future__ import annotations

import pytest

from core.command_line import all_problems
from core.config.composition import examine

CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "settings, refused",
    [
        (["rollout_rs=token"], True),  # no threshold
        (["rollout_rs=token", "rollout_rs_threshold='nan'"], True),
        (["rollout_rs=token", "rollout_rs_threshold=2.0"], False),
        (["rollout_is=token", "rollout_is_threshold=0.5"], True),  # below 1, where nothing differs
        (["rollout_is=token", "rollout_is_threshold=0.5_2.0"], False),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(settings, refused):
    composed = examine("ppo", [f"{CORRECTION}.{setting}" for setting in settings])
    problems = all_problems(composed, frozenset())
    assert [line.partition("=")[0] for line in problems] == [f"{CORRECTION}.rollout_rs"] * refused
