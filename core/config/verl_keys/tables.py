"""The tables of ``keys.yaml`` and of a recipe's ``verl_keys.yaml``: lookups of a key, without what a line holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from core.config import convert, recipes
from core.config.schema import Config
from core.config.yaml_files import read_table

FILE = Path(__file__).with_name("keys.yaml")


@dataclass(frozen=True)
class Tables:
    """What one or several files hold; see the comments of ``keys.yaml``.

    same: key there -> key here. values: key here -> value there -> value here. hints: key here -> what to do.
    no_effect: key -> how its purpose is met. asks_nothing: key -> values that request nothing.
    refused: (key or pattern, rule, fix). older: keys of lines that relied on defaults of verl up to 0.3. gone: key of
    earlier versions of this repository -> what to do.
    """

    same: dict[str, str] = field(default_factory=dict)
    values: dict[str, Mapping[Any, Any]] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    no_effect: dict[str, str] = field(default_factory=dict)
    asks_nothing: dict[str, list[Any]] = field(default_factory=dict)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    older: set[str] = field(default_factory=set)
    gone: dict[str, str] = field(default_factory=dict)

    def add(self, table: Mapping[str, Any]) -> None:
        """Add what a file holds."""
        self.same.update(table.get("same", {}))
        self.values.update(table.get("values", {}))
        self.hints.update(table.get("hints", {}))
        self.no_effect.update({key: why for why, keys in table.get("no_effect", {}).items() for key in _names(keys)})
        for value, keys in table.get("asks_nothing", ()):
            for key in _names(keys):
                self.asks_nothing.setdefault(key, []).append(value)
        self.refused.extend(
            (key, entry["rule"], entry["fix"]) for entry in table.get("refused", ()) for key in entry["keys"]
        )
        self.gone.update(table.get("gone", {}))
        self.older.update(_names(table.get("older_defaults", {}).get("keys", ())))

    def target(self, key: str, schema: type[Config]) -> str | None:
        """Return the key here that another name stands for, or None."""
        if key in self.same:
            return self.same[key]
        parts = key.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            if there := self.same.get(".".join([*parts[:depth], "*"])):
                target = ".".join([there.removesuffix(".*"), *parts[depth:]])
                return target if convert.known(target, schema) or recipes.switch_of(target) else None
        return None

    def reason(self, key: str, schema: type[Config]) -> str | None:
        """Return how the purpose of a key without effect is met, or None."""
        return next((self.no_effect[name] for name in _as_named(key, schema) if name in self.no_effect), None)

    def requests_nothing(self, key: str, value: Any, schema: type[Config]) -> bool:
        """Return whether the value of the key is listed as one that requests nothing."""
        values = (one for name in _as_named(key, schema) for one in self.asks_nothing.get(name, ()))
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)

    def advice(self, key: str, by_pattern: bool = True) -> tuple[str, str] | None:
        """Return rule and fix for a key that is not here, or None; of one that a pattern stands for, if asked."""
        if key in self.gone:
            return "is gone", self.gone[key]
        named = (each for each in self.refused if key == each[0])
        like = (each for each in self.refused if by_pattern and fnmatchcase(key, each[0]))
        entry = next(named, None) or next(like, None)
        return entry and (entry[1], entry[2].replace("{key}", key))

    def hint(self, key: str) -> str | None:
        """Return what to do about a value of a known key that the schema refuses, or None."""
        return next((text for name, text in self.hints.items() if fnmatchcase(key, name)), None)


@functools.cache
def tables(recipe: str = "") -> Tables:
    """Return the tables that a recipe's command lines are read with: its own, and the common ones."""
    found, common = Tables(), read_table(FILE)
    own = (recipes.table(recipe, "verl_keys.yaml") if recipe else None) or {}
    found.add({**common, "refused": [*own.get("refused", ()), *common["refused"]]})  # the first that fits counts
    found.add({**own, "refused": ()})
    return found


def described(recipe: str) -> Iterator[tuple[str, str]]:
    """Yield every name of the tables with what is said of it, for ``--help WORD``."""
    table = tables(recipe)
    for key, target in table.same.items():
        yield key, f"is read as {target}"
    for key, why in table.no_effect.items():
        yield key, f"has no effect: {why}"
    for key, rule, fix in table.refused:
        yield key, f"{rule}; {fix.replace('{key}', key)}"


def _names(keys: Any) -> Iterator[str]:
    for part in keys:
        yield from part if isinstance(part, list) else [part]


def _as_named(key: str, schema: type[Config]) -> Iterator[str]:
    """Yield the forms in which a table may name a key: in full, or with ``*`` for a section of the schema."""
    yield key
    parts = key.split(".")
    for depth in range(1, len(parts)):
        if ".".join(parts[:depth]) in convert.sections(schema):
            yield ".".join(["*", *parts[depth:]])
