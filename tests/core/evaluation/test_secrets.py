"""Secrets of a configuration in what an evaluation records of it."""

from __future__ import annotations

from core.config import convert, examine
from core.evaluation.generate import deciding
from tests.core.config.test_secret_keys import RUNNING, SECRET


def test_what_decides_on_answers_holds_no_secret():
    config = examine("grpo", RUNNING).config
    assert str(convert.as_tree(config)).count(SECRET) == len(RUNNING), "the configuration has them"
    assert SECRET not in str(deciding(config))
