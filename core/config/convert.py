"""Flat keys, trees and YAML of a typed configuration."""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from core.config.schema import Config
from core.config.section import Open, Section, hints, is_section
from core.secret_keys import hidden

# --- the keys of a schema ---


def _fields(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield flat key and type of every key and section; the keys of a section come first."""
    for name, hint in sorted(hints(schema).items(), key=lambda field: is_section(field[1])):
        yield f"{prefix}{name}", hint
        if is_section(hint):
            yield from _fields(hint, f"{prefix}{name}.")


@functools.cache
def all_keys(schema: type[Section] = Config) -> dict[str, Any]:
    """Return flat key -> type, of a whole configuration, without its sections."""
    return {key: hint for key, hint in _fields(schema) if not is_section(hint)}


@functools.cache
def sections(schema: type[Section] = Config) -> dict[str, type[Section]]:
    """Return flat key -> class, of the sections of a whole configuration."""
    return {key: hint for key, hint in _fields(schema) if is_section(hint)}


def known(key: str, schema: type[Section] = Config) -> bool:
    """Return whether the schema has the key, or a mapping of the user's own that holds it."""
    keys = all_keys(schema)
    names = key.split(".")
    above = [keys.get(".".join(names[:depth])) for depth in range(1, len(names))]
    return key in keys or any(Open in (hint, *get_args(hint)) for hint in above)


# --- values ---


def get(config: Any, key: str) -> Any:
    """Return the value of a flat key."""
    return functools.reduce(getattr, key.split("."), config)


def replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return the configuration with the values of these flat keys."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        if rest:
            value = replaced(getattr(config, name), {rest: value})
        config = config.replace(**{name: value})
    return config


def flat(config: Any) -> dict[str, Any]:
    """Return flat key -> value, of every key."""
    return {key: get(config, key) for key in all_keys(type(config))}


def as_tree(config: Section) -> dict[str, Any]:
    """Return a section as nested dicts and lists."""
    return config.model_dump(mode="json", warnings=False)


def as_recorded(config: Section) -> dict[str, Any]:
    """Return what a run writes and sends to loggers: nested dicts and lists, without secrets."""
    return hidden(as_tree(config))


def as_json(config: Config) -> dict[str, Any]:
    """Return flat key -> value as JSON has it, without secrets: it is hashed and compared."""
    return dict(leaves(as_recorded(config), all_keys(type(config)).__contains__))


def to_yaml(config: Section) -> str:
    """Return the text of a run folder's ``config.yaml``: every key, without secrets."""
    return yaml.safe_dump(as_recorded(config), sort_keys=False, width=120)


# --- trees ---


def leaves(
    tree: Mapping[str, Any], stop: Callable[[str], bool] = lambda key: False, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield flat key and value of a tree: mappings are opened but for those at which to stop."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not stop(key):
            yield from leaves(value, stop, f"{key}.")
        else:
            yield key, value


def over(below: Any, *layers: Any) -> Any:
    """Return trees over each other: mappings are joined, anything else is replaced."""
    for above in layers:
        if isinstance(above, Mapping):
            joined = dict(below) if isinstance(below, Mapping) else {}
            for name, value in above.items():
                joined[str(name)] = over(joined.get(str(name)), value)
            below = joined
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


# --- files ---

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, if compiled in, is 10 x as fast


@functools.cache
def read_table(path: Path) -> Any:
    """Return what a YAML file holds. It is read once a process."""
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)
