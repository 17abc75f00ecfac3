"""The defaults that differ from verl v0.6.1's, read from ``defaults.yaml``, and the README's table of them.

The defaults themselves stand in ``schema.py``; a test holds them against both lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config.yaml_tables import read_table


@dataclass(frozen=True)
class ChangedDefault:
    """A key, verl's default, the one here, and the reason."""

    key: str
    verl: Any
    here: Any
    why: str


CHANGED_DEFAULTS = tuple(ChangedDefault(**entry) for entry in read_table(Path(__file__).with_suffix(".yaml")))


def table() -> str:
    """Return the README's table of changed defaults."""
    shown = [(d.key, *("null" if one is None else one for one in (d.verl, d.here)), d.why) for d in CHANGED_DEFAULTS]
    rows = [f"| `{key}` | `{verl}` | `{here}` | {why} |" for key, verl, here, why in shown]
    return "\n".join(["| key | verl | here | why |", "|---|---|---|---|", *rows])
