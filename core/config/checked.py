"""Composing a configuration, checking it, and reading and writing it as YAML: what ``core.config`` offers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from core.config import chat_template, convert, recipes, reference_rows, roles, rules, unused_keys
from core.config.derived_defaults import resolve
from core.config.from_tree import build
from core.config.schema import Config
from core.config.view import View
from core.config.yaml_tables import CHANGED_DEFAULTS, ChangedDefault  # noqa: F401  (offered by core.config)
from core.errors import InputError


@dataclass(frozen=True)
class Composed:
    """A configuration and everything that was found out about it.

    config: resolved; with ``problems`` a refused value is replaced by its default.
    given: the keys that an override set (not those of the recipe's file), with the values as read.
    unused: key -> (value, reason), for overrides that do nothing in this configuration.
    without_effect: every key that does nothing in it, whoever set it.
    """

    config: Config
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    given: Mapping[str, Any]
    unused: Mapping[str, tuple[Any, str]]
    without_effect: frozenset[str]


def examine(
    recipe: str, overrides: Sequence[str], hooks: Collection[str] = (), base: Mapping[str, Any] | None = None
) -> Composed:
    """Compose and check without raising. ``hooks`` names the hooks that the recipe's trainer overrides.

    ``base`` holds values by flat key that lie over the recipe's and below the overrides: those of a run, say.
    """
    from core.config import composition  # Hydra: half a second that reading a saved configuration need not pay

    schema = recipes.schema_of(recipe)
    layers = composition.read(overrides, schema)
    layers.values[:0] = (base or {}).items()
    tree = composition.tree(recipe, layers)
    refused = list(layers.problems)
    config = chat_template.with_text(resolve(build(schema, tree, refused), recipe))
    refused += chat_template.problems(config)
    view = View(config, layers.given, hooks, recipe)
    bad = {problem.key for problem in refused if isinstance(problem, convert.Problem)}
    unknown, departures = reference_rows.check(recipe, config)
    lines = [*refused, *rules.problems(view, bad), *unknown]
    without_effect = unused_keys.reasons(view, [*layers.given, *convert.all_keys(schema)])
    unused = {key: (value, without_effect[key]) for key, value in layers.given.items() if key in without_effect}
    return Composed(
        config=config,
        problems=tuple(dict.fromkeys(map(str, lines))),
        warnings=(*rules.warnings(view), *departures),
        given=layers.given,
        unused={**layers.unused, **unused},
        without_effect=frozenset(without_effect),
    )


def compose(recipe: str, overrides: Sequence[str] = (), hooks: Collection[str] = ()) -> Config:
    """Return the resolved configuration of a recipe under these overrides.

    Whether the files that it names exist is checked at start, not here.

    Raises:
        InputError: every problem there is, a line each.
    """
    composed = examine(recipe, overrides, hooks)
    if composed.problems:
        raise InputError(composed.problems)
    return composed.config


def to_yaml(config: Config) -> str:
    """Return the text of a run folder's ``config.yaml``: every key, in the order of the schema."""
    return yaml.safe_dump(convert.as_tree(config), sort_keys=False, width=120)


def from_yaml(text: str) -> Config:
    """Return the configuration that :func:`to_yaml` wrote, in the schema that lacks fewest of its sections.

    Raises:
        InputError: a key or a value is not the schema's.
    """
    tree, problems = yaml.safe_load(text), []
    config = build(roles.schema_for(tree), tree, problems)
    if problems:
        raise InputError([str(problem) for problem in problems])
    return config


def diff(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return flat key -> the two values, of the keys in which two configurations differ; a missing one is None."""
    first, second = convert.flat(one), convert.flat(other)
    keys = [*first, *(key for key in second if key not in first)]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}
