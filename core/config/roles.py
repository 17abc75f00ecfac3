"""What a change of a key means for a run, and configurations of other versions in the terms of this one.

``key_roles.yaml`` has the role of every key. Resuming (``core/checkpoint/manifest.py``) refuses another objective;
comparing runs (``results/reporting/run_reader.py``) leaves bookkeeping out. This module decides neither.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.config import convert, recipes
from core.config.derived_defaults import resolve
from core.config.problem import Problem
from core.config.schema import Config
from core.config.section import hints
from core.config.unknown_keys import validated
from core.config.yaml_files import read_table

FILE = "key_roles.yaml"
OBJECTIVE, FILES, EXECUTION, BOOKKEEPING = "objective", "files", "execution", "bookkeeping"
ALL = "*"  # in the table: every key of the section


def entries(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, role) of a table of roles; a whole section is ``section.*``."""
    for role, sections in table.items():
        for section, names in sections.items():
            for name in (one for part in names for one in (part if isinstance(part, list) else [part])):
                yield ".".join(filter(None, (section, name))), role


@functools.cache
def table() -> dict[str, str]:
    """Return key -> role, of the core's keys and those of recipes."""
    tables = [read_table(Path(__file__).with_name(FILE))]
    tables += [added for recipe, _ in recipes.extended() if (added := recipes.table(recipe, FILE)) is not None]
    return {key: role for one in tables for key, role in entries(one)}


def role_of(key: str) -> str:
    """Return the role of a flat key, or of one inside a user's own mapping; objective where the table lacks it."""
    roles, parts = table(), key.split(".")
    above = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    for name in above:
        if role := roles.get(name) or roles.get(f"{name.rpartition('.')[0]}.{ALL}"):
            return role
    return OBJECTIVE


def completed(values: Mapping[str, Any], schema: type[Config], recipe: str = "") -> dict[str, Any]:
    """Return flat key -> value (as JSON has it) of a configuration that any version wrote, nested or flat.

    A key that ``values`` lacks has its default, which may follow from others. A key that the schema lacks is left out
    where it has the default of the recipe that has it, as are Search-R1's keys, which every recipe had once. So two
    versions' records of the same settings are equal.
    """
    problems: list[Problem] = []
    config = resolve(validated(schema, without_others(_nested(values), schema), problems), recipe)
    complete = convert.as_json(config)
    for problem in problems:
        complete |= dict(_leaves(problem.key, problem.value, _defaults()))
    return complete


def without_others(values: Mapping[str, Any], schema: type[Config], prefix: str = "") -> dict[str, Any]:
    """Return nested values without other recipes' keys that the schema lacks, where these have their defaults."""
    kept, others = {}, _defaults()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if convert.known(key, schema) or key in others:
            inner, others_default = value, not convert.known(key, schema) and others[key] == value
        else:
            inner = without_others(value, schema, f"{key}.") if isinstance(value, Mapping) else value
            others_default = isinstance(value, Mapping) and value and not inner
        if not others_default:
            kept[name] = inner
    return kept


def schema_for(values: Mapping[str, Any]) -> type[Config]:
    """Return the schema that lacks fewest of the sections, then of the keys, of a nested or flat configuration."""
    sections, others = {key.partition(".")[0] for key in values}, _defaults()
    leaves = {name: leaf for key, value in values.items() for name, leaf in _leaves(key, value, others)}
    names = {name for name, leaf in leaves.items() if name in others and leaf != others[name]}
    schemas = [Config, *(module.SCHEMA for _, module in recipes.extended())]
    return min(schemas, key=lambda one: (len(sections - hints(one).keys()), len(names - convert.all_keys(one).keys())))


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return flat key -> default, of every recipe's own keys."""
    defaults: dict[str, Any] = {}
    for _, module in recipes.extended():
        core = convert.all_keys(Config)
        defaults |= {key: value for key, value in convert.as_json(module.SCHEMA()).items() if key not in core}
    return defaults


def _leaves(key: str, value: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield flat keys and values of a section, down to the known keys."""
    if key not in known and isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item, known)
    else:
        yield key, json.loads(json.dumps(value, default=str))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat keys as a tree; what is nested already stays."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
