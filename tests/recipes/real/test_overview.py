"""The page of all stages: which files belong to a stage, and what its cell says."""

from __future__ import annotations

import re
from pathlib import Path

from recipes.real import overview

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_beside_a_row_is_one_that_can_be_typed(subtests):
    for stage in overview.STAGES:
        with subtests.test(stage=stage):
            script, *words = overview.STAGES[stage][1].split()
            assert (ROOT / script).is_file()
            known = (ROOT / "recipes/real/common.sh").read_text(encoding="utf-8")
            assert all("=" in word or word == "TASK" or re.search(rf"\b{word}\b.*\)", known) for word in words)
