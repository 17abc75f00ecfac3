"""Supported keys that do nothing in a configuration: listed with the reason where an override set them.

The entries are in ``unused_keys.yaml``. Keys that no configuration of this repository has are those of ``verl_keys``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from core.config import recipes
from core.config.view import View
from core.config.yaml_tables import entries, read_table

TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Unused:
    """Keys, or patterns of keys, the condition under which they do nothing, and why, formatted with the view."""

    keys: tuple[str, ...]
    when: str
    reason: str

    def fits(self, key: str) -> bool:
        """Return whether the entry is about this key."""
        return any(fnmatchcase(key, pattern) for pattern in self.keys)


@functools.cache
def table(recipe: str) -> tuple[Unused, ...]:
    """Return a recipe's entries; of those that fit a key, the first whose condition holds gives the reason."""
    found = entries([*read_table(TABLE), *(recipes.table(recipe, TABLE.name) or ())])
    return tuple(Unused(tuple(one["keys"]), one["when"], one["reason"]) for one in found)


def reasons(view: View, keys: Iterable[str]) -> dict[str, str]:
    """Return key -> why it does nothing, for those of ``keys`` that do nothing."""
    active = [entry for entry in table(view.recipe) if view.holds(entry.when)]
    first = {key: next((entry for entry in active if entry.fits(key)), None) for key in keys}
    return {key: entry.reason.format_map(view) for key, entry in first.items() if entry is not None}
