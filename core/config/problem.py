"""A problem with a configuration, and values and texts as messages show them: in one line, without secrets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from core.config.secret_keys import hidden
from core.config.section import thaw
from core.errors import one_line


@dataclass(frozen=True)
class Problem:
    """A key, its value, the rule that it breaks and what to do; as text one line."""

    key: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.key}={brief(show(self.value, self.key))}: {self.rule}"
        return one_line(text + (f"; {self.fix}" if self.fix else ""))


def show(value: Any, key: str = "") -> str:
    """Return the value of a key for a message: as one would type it, in one line, without secrets."""
    return typed(hidden(thaw(value), key))


def typed(value: Any) -> str:
    """Return a value as one would type it on the command line, in one line. Only for what runs: it shows secrets."""
    value = thaw(value)
    if value is None or isinstance(value, bool | list | dict):
        return one_line(json.dumps(value, default=str, ensure_ascii=False))
    return repr(value) if isinstance(value, float) else one_line(str(value))


def brief(text: str) -> str:
    """Return what was typed for a message: in one line, cut where it is longer than a screen's width."""
    return one_line(text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)")
