"""Composing a configuration, checking it, and reading and writing it as YAML: what ``core.config`` offers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from core.config import chat_template, convert, recipes, reference_rows, roles, rules
from core.config.derived_defaults import resolve
from core.config.problem import Problem
from core.config.schema import Config
from core.config.secret_keys import login_in, without_hidden, without_login
from core.config.unknown_keys import validated
from core.config.verl_keys.tables import tables
from core.config.view import View
from core.config.yaml_files import read_yaml
from core.errors import InputError


@dataclass(frozen=True)
class Composed:
    """A configuration and everything that was found out about it.

    config: resolved; with ``problems`` a refused value is replaced by its default.
    given: the keys that an override set (not those of the recipe's file), with the values as read.
    read: key of another version -> (value, the settings here that it was read as).
    unused: key -> (value, reason), for overrides that do nothing in this configuration.
    without_effect: every key that has no effect in it, from any source.
    """

    config: Config
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    given: Mapping[str, Any]
    read: Mapping[str, tuple[Any, Mapping[str, Any]]]
    unused: Mapping[str, tuple[Any, str]]
    without_effect: frozenset[str]


def examine(
    recipe: str, overrides: Sequence[str], hooks: Collection[str] = (), base: Mapping[str, Any] | None = None
) -> Composed:
    """Compose and check without raising. ``hooks`` names the hooks that the recipe's trainer overrides.

    ``base`` holds values by flat key that lie over the recipe's and below the overrides: those of a run, say. They are
    taken as they are: a ``${...}`` in them could read the environment.
    """
    from core.config import composition  # Hydra: half a second that reading a saved configuration need not pay

    schema = recipes.schema_of(recipe)
    layers = composition.read(overrides, recipe)
    layers.values[:0] = composition.literal(without_hidden(roles.without_others(base or {}, schema))).items()
    tree = composition.tree(layers)
    composition.of_other_recipes(layers, overrides)
    refused = list(layers.problems)
    config = chat_template.with_text(resolve(validated(schema, tree, refused, layers.line), recipe))
    refused += chat_template.problems(config)
    view = View(config, layers.given, hooks, recipe)
    bad = {one.key for one in refused if isinstance(one, Problem)}
    unknown, departures = reference_rows.check(recipe, config)
    lines = [*refused, *_logins(config), *rules.problems(view, bad), *unknown]
    without_effect = rules.reasons(view, [*layers.given, *convert.all_keys(schema)])
    foreign = layers.unused or layers.line.read
    from core.config.verl_keys.reading import older_defaults

    older = older_defaults(layers.line) if foreign else ()
    unused = {key: (value, without_effect[key]) for key, value in layers.given.items() if key in without_effect}
    return Composed(
        config=config,
        problems=tuple(dict.fromkeys(map(str, lines))),
        warnings=(*rules.warnings(view), *departures, *older, *_forgotten(base or {}, layers.given)),
        given=layers.given,
        read=layers.line.read,
        unused={**layers.unused, **unused},
        without_effect=frozenset(without_effect),
    )


def _logins(config: Config) -> Iterator[Problem]:
    """Yield the URLs that hold a login: a URL is a name, which is recorded, printed and compared."""
    reported = set()  # other keys follow one that names a model
    for key, value in convert.flat(config).items():
        for name, text in _texts(key, value):
            if text not in reported and (login := login_in(text)) is not None:
                reported.add(text)
                yield Problem(
                    name, without_login(text), f"holds a login ({login}), and is recorded", _fix(key, type(config))
                )


def _forgotten(base: Mapping[str, Any], given: Collection[str]) -> Iterator[str]:
    """Yield a line for each key of a recorded configuration whose secrets are not there, unless it is given anew."""
    for key, value in base.items():
        if without_hidden({key: value}) != {key: value} and not any(name.startswith(key) for name in given):
            yield f"{key}: held a secret, which is not recorded; give it again where this command needs it"


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(key, item)


def _fix(key: str, schema: type[Config]) -> str:
    section = key.rpartition(".")[0]
    if f"{section}.api_key_env" in convert.all_keys(schema):
        return f"put the key into an environment variable, and its name into {section}.api_key_env"
    if section.startswith("retriever"):
        return "put the key into an environment variable, and its name into retriever.client={api_key_env: NAME}"
    drivers = "s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return f"leave it out, and export the login that the driver reads ({drivers}), or copy the file and give its path"


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
    """Return the text of a run folder's ``config.yaml``: every key, in the order of the schema, without secrets."""
    return yaml.safe_dump(convert.as_recorded(config), sort_keys=False, width=120)


def from_yaml(text: str) -> Config:
    """Return the configuration that :func:`to_yaml` wrote, in the schema that lacks fewest of its sections.

    Secrets, which it does not hold, are left out, and so are keys that are gone since it was written.

    Raises:
        InputError: a key or a value is not the schema's.
    """
    problems: list[Any] = []
    try:
        tree = _without_gone(without_hidden(read_yaml(text)))
    except ValueError as error:
        raise InputError(f"config.yaml: {error}") from error
    schema = roles.schema_for(tree)
    config = validated(schema, roles.without_others(tree, schema), problems)
    if problems:
        raise InputError([str(problem) for problem in problems])
    return config


def _without_gone(tree: Any, prefix: str = "") -> Any:
    """Return a recorded tree without the keys that this version of the code has no more."""
    if not isinstance(tree, dict):
        return tree
    kept = {name: value for name, value in tree.items() if f"{prefix}{name}" not in tables().gone}
    return {name: _without_gone(value, f"{prefix}{name}.") for name, value in kept.items()}


def diff(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return flat key -> the two values, of the keys in which two configurations differ; a missing one is None."""
    first, second = convert.flat(one), convert.flat(other)
    keys = [*first, *(key for key in second if key not in first)]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}
