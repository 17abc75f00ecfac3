"""Supported keys that do nothing in a configuration: listed with the reason where an override set them.

The entries are in ``unused_keys.yaml``. Keys that no configuration of this repository has are those of ``verl_keys``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from core.config import recipes, registry
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


# Settings of an engine that the chosen one lacks.
_ENGINES = tuple(
    Unused(
        (f"actor_rollout_ref.rollout.{name}",),
        f"{name!r} not in engine.reads",
        "actor_rollout_ref.rollout.name={rollout.name} has no such setting",
    )
    for entry in registry.ENGINES.values()
    for name in entry.reads
)


@functools.cache
def table(recipe: str) -> tuple[Unused, ...]:
    """Return a recipe's entries; of those that fit a key, the first whose condition holds gives the reason."""
    found = entries([*read_table(TABLE), *(recipes.table(recipe, TABLE.name) or ())])
    return (*_ENGINES, *(Unused(tuple(one["keys"]), one["when"], one["reason"]) for one in found))


def reasons(view: View, keys: Iterable[str]) -> dict[str, str]:
    """Return key -> why it does nothing, for those of ``keys`` that do nothing."""
    active = [view.holds(entry.when) for entry in table(view.recipe)]
    first = {key: next((number for number in _about(view.recipe, key) if active[number]), None) for key in keys}
    entry = table(view.recipe)
    return {key: entry[number].reason.format_map(view) for key, number in first.items() if number is not None}


@functools.cache  # hundreds of keys and patterns, and the same ones for every configuration
def _about(recipe: str, key: str) -> tuple[int, ...]:
    """Return the numbers of a recipe's entries that are about a key."""
    return tuple(number for number, entry in enumerate(table(recipe)) if entry.fits(key))
