"""Flat keys, trees and YAML of a typed configuration."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from core.config.schema import Config
from core.config.section import Open, Section, hints, is_section, optional, thaw
from core.secret_keys import hidden


@functools.cache
def all_keys(schema: type = Config) -> dict[str, Any]:
    """Return flat key -> type, of a whole configuration, sections left out."""
    own = {name: hint for name, hint in hints(schema).items() if not is_section(hint)}
    below = {name: hint for name, hint in hints(schema).items() if is_section(hint)}
    return own | {
        f"{name}.{key}": hint
        for name, section in below.items()
        for key, hint in all_keys(section).items()
    }


@functools.cache
def sections(schema: type = Config) -> dict[str, type]:
    """Return flat key -> class, of the sections of a whole configuration."""
    own = {name: hint for name, hint in hints(schema).items() if is_section(hint)}
    return own | {
        f"{name}.{key}": part
        for name, section in own.items()
        for key, part in sections(section).items()
    }


def known(key: str, schema: type = Config) -> bool:
    """Return whether the schema has the key, or a mapping of the user's own that the key is a part
    of."""
    keys, parts = all_keys(schema), key.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return key in keys or any(parent in keys and optional(keys[parent]) is Open for parent in above)


def get(config: Any, key: str) -> Any:
    """Return the value of a flat key."""
    return functools.reduce(getattr, key.split("."), config)


def flat(config: Any) -> dict[str, Any]:
    """Return flat key -> value, of every key."""
    return {key: get(config, key) for key in all_keys(type(config))}


def as_json(config: Any) -> dict[str, Any]:
    """Return flat key -> value, of every key, as JSON gives it back and without secrets: it is
    hashed and compared."""
    shown = {key: hidden(thaw(value), key) for key, value in flat(config).items()}
    return json.loads(json.dumps(shown, default=str))


def replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return the configuration with the values of these flat keys."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        config = config.replace(
            **{name: replaced(getattr(config, name), {rest: value}) if rest else value}
        )
    return config


def as_tree(section: Any) -> dict[str, Any]:
    """Return a section as nested dicts and lists."""
    values = {name: getattr(section, name) for name in hints(type(section))}
    return {
        name: as_tree(value) if isinstance(value, Section) else thaw(value)
        for name, value in values.items()
    }


def as_recorded(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dicts and lists, without secrets: what a run writes, and
    sends to loggers."""
    return hidden(as_tree(config))


def to_yaml(config: Any) -> str:
    """Return the text of a run folder's ``config.yaml``: every key, in the order of the schema,
    without secrets."""
    return yaml.safe_dump(as_recorded(config), sort_keys=False, width=120)


def over(below: Any, *layers: Any) -> Any:
    """Return trees over each other: mappings joined, with names as text, and anything else
    replaced."""
    for above in layers:
        if isinstance(above, Mapping):
            joined = dict(below) if isinstance(below, Mapping) else {}
            below = joined | {
                str(name): over(joined.get(str(name)), value) for name, value in above.items()
            }
        else:
            below = above
    return below


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of flat keys; of the same part the later one wins."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        tree = over(tree, value)
    return tree


# Libyaml where it is compiled in: ten times as fast
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def read_table(path: Path) -> Any:
    """Return what a YAML file holds. It is read once a process."""
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)


def yaml_reason(error: Exception) -> str:
    """Return in one line why a file is no YAML: the line of the file, counted from 1, and the
    problem."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).split("\n")[0]
    return (
        f"line {mark.line + 1}, column {mark.column + 1}: "
        f"{getattr(error, 'problem', None) or error}"
    )
