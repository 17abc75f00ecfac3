"""Trees to typed configurations: composed ones, and those that a run, a checkpoint or a file of answers recorded.

What a change of a key means (its role) is said by its field in the schema. Resuming (``core/checkpoint``) refuses
another objective; comparing runs (``results/reporting``) leaves bookkeeping out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from core.config import convert, recipes, verl_names
from core.config.defaults import resolve
from core.config.schema import Config
from core.config.secret_keys import without_hidden
from core.config.section import (
    IDENTITY,
    MAPPING,
    Problem,
    build,
    hints,
    is_section,
    mark,
    show,
)
from core.config.verl_names import CommandLine, unknown_key


def validated(schema: type[Config], tree: Any, problems: list[Any], line: CommandLine | None = None) -> Config:
    """Return the typed configuration of a tree. What is wrong goes to ``problems``, and its key keeps the default.

    With ``line``, of a command line, a value that the schema refuses may be one of another version's.
    """
    config, refused = build(schema, tree)
    known, readings = convert.all_keys(schema), {}
    for key, value, rule in refused:
        if line and rule and key in known and (reading := verl_names.read_value(key, value, line)):
            readings[key] = reading
    if settings := {name: value for reading in readings.values() for name, value in reading.settings.items()}:
        line.read.update({key: (value, readings[key].settings) for key, value, _ in refused if key in readings})
        return validated(schema, _with(tree, settings), problems, line)
    for key, value, rule in refused:
        if not rule:
            problems.append(unknown_key(key, value, line or CommandLine("", schema)))
        elif rule == MAPPING and key not in known:
            problems.append(Problem(key, value, "is a section of the configuration", "set one of its keys"))
        else:
            fix = readings[key].fix if key in readings else f"the default is {show(convert.get(config, key))}"
            problems.append(Problem(key, value, f"must be {rule}", fix))
    return config


def _with(tree: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with other values of these keys, which it has."""
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        tree = {**tree, name: _with(tree[name], {rest: value}) if rest else value}
    return dict(tree)


# --- recorded ---


def schemas() -> list[type[Config]]:
    """Return the classes of all recipes' configurations."""
    return [Config, *(module.SCHEMA for _, module in recipes.extended())]


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return flat key -> default, of every recipe: one that another recipe's record holds means nothing."""
    return {key: value for schema in schemas() for key, value in convert.as_json(schema()).items()}


def _leaves(values: Mapping[str, Any], schema: type[Config], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield flat keys and values (as JSON has them) of a configuration, nested or flat, without those that are gone."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in verl_names.table()["gone"]:
            continue
        if isinstance(value, Mapping) and value and not convert.known(key, schema):
            yield from _leaves(value, schema, f"{key}.")
        else:
            yield key, json.loads(json.dumps(value, default=str))


def own_tree(values: Mapping[str, Any], schema: type[Config]) -> dict[str, Any]:
    """Return a recorded configuration as a tree of what the schema has, without secrets, which it does not hold."""
    tree: dict[str, Any] = {}
    for key, value in _leaves(without_hidden(values), schema):
        if convert.known(key, schema):
            *parents, name = key.split(".")
            functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[name] = value
    return tree


def completed(values: Mapping[str, Any], schema: type[Config], recipe: str = "") -> dict[str, Any]:
    """Return flat key -> value (as JSON has it) of a configuration that any version wrote, nested or flat.

    A key that ``values`` lacks has its default, which may follow from others. What the schema refuses or lacks is as it
    was recorded, but for other recipes' defaults. So two versions' records of the same settings are equal.
    """
    problems: list[Problem] = []
    complete = convert.as_json(resolve(validated(schema, own_tree(values, schema), problems), recipe))
    left = ((key, value) for key, value in _leaves(values, schema) if not convert.known(key, schema))
    lacking = {key: value for key, value in left if key not in _defaults() or _defaults()[key] != value}
    return complete | lacking | {problem.key: problem.value for problem in problems}


def diff(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return flat key -> the two values, of the keys in which two configurations differ; a missing one is None."""
    first, second = convert.flat(one), convert.flat(other)
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def role_of(key: str) -> str:
    """Return the role of a flat key, or of one inside a user's own mapping; IDENTITY where no schema has it."""
    for section in schemas():
        role = None
        for name in key.split("."):
            if name not in section.model_fields:
                break
            role = mark(section, name, "role") or role
            section = hints(section)[name]
            if not is_section(section):
                return role or IDENTITY
    return IDENTITY
