"""From an untyped tree, as YAML and overrides give it, to the typed configuration, with every problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from core.config import verl_keys
from core.config.convert import Mismatch, Problem, hints, parse, show
from core.config.schema import Config
from core.config.unknown_keys import unknown_key


def build(schema: type[Config], tree: Any, problems: list[Problem]) -> Config:
    """Return the typed configuration of a tree. What is wrong goes to ``problems``, and its key keeps the default."""
    return _section(schema, tree, problems, schema(), "")


def _section(schema: type[Config], tree: Any, problems: list[Problem], default: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        problems.append(Problem(prefix.rstrip("."), tree, "is a section of the configuration", "set one of its keys"))
        return default
    known_here = hints(type(default))
    problems += [unknown_key(f"{prefix}{name}", tree[name], schema) for name in tree if name not in known_here]
    values = {}
    for name, hint in known_here.items():
        if name not in tree:
            continue
        if is_dataclass(hint):
            values[name] = _section(schema, tree[name], problems, getattr(default, name), f"{prefix}{name}.")
            continue
        try:
            values[name] = parse(hint, tree[name])
        except Mismatch as error:
            key = f"{prefix}{name}"
            fix = verl_keys.hint(key) or f"the default is {show(getattr(default, name))}"
            problems.append(Problem(key, tree[name], f"must be {error}", fix))
    return dataclasses.replace(default, **values)
