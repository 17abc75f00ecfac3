"""Composing a configuration, checking it, and reading and writing it as YAML: what ``core.config`` offers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from core.config import convert, paths, recipes, rules, verl_names
from core.config.convert import read_yaml
from core.config.defaults import resolve
from core.config.problem import Problem, show
from core.config.rules import View
from core.config.schema import Config
from core.config.secret_keys import login_in, without_hidden, without_login
from core.config.section import MAPPING, build, hints
from core.config.verl_names import CommandLine, unknown_key
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
    layers.values[:0] = literal(without_hidden(without_others(base or {}, schema))).items()
    tree = composition.tree(layers)
    composition.of_other_recipes(layers, overrides)
    refused = list(layers.problems)
    config = paths.with_template_text(resolve(validated(schema, tree, refused, layers.line), recipe))
    refused += paths.template_problems(config)
    view = View(config, layers.given, hooks, recipe)
    bad = {one.key for one in refused if isinstance(one, Problem)}
    lines = [*refused, *_logins(config), *rules.problems(view, bad)]
    without_effect = rules.reasons(view, [*layers.given, *convert.all_keys(schema)])
    foreign = layers.unused or layers.line.read
    older = verl_names.older_defaults(layers.line) if foreign else ()
    unused = {key: (value, without_effect[key]) for key, value in layers.given.items() if key in without_effect}
    return Composed(
        config=config,
        problems=tuple(dict.fromkeys(map(str, lines))),
        warnings=(*rules.warnings(view), *older, *_forgotten(base or {}, layers.given)),
        given=layers.given,
        read=layers.line.read,
        unused={**layers.unused, **unused},
        without_effect=frozenset(without_effect),
    )


def literal(value: Any) -> Any:
    """Return the value with every ``${`` in its texts written so that it stands for itself."""
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def validated(schema: type[Config], tree: Any, problems: list[Problem], line: CommandLine | None = None) -> Config:
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


def schemas() -> list[type[Config]]:
    """Return the classes of all recipes' configurations."""
    return [Config, *(module.SCHEMA for _, module in recipes.extended())]


def schema_for(values: Mapping[str, Any]) -> type[Config]:
    """Return the schema that lacks fewest of the sections, then of the keys, of a nested or flat configuration."""
    sections, others = {key.partition(".")[0] for key in values}, own_defaults()
    found = {name: leaf for key, value in values.items() for name, leaf in leaves(key, value, others)}
    names = {name for name, leaf in found.items() if name in others and leaf != others[name]}
    return min(
        schemas(), key=lambda one: (len(sections - hints(one).keys()), len(names - convert.all_keys(one).keys()))
    )


@functools.cache
def own_defaults() -> dict[str, Any]:
    """Return flat key -> default, of every recipe's own keys."""
    own, core = [convert.as_json(schema()) for schema in schemas()[1:]], convert.all_keys(Config)
    return {key: value for values in own for key, value in values.items() if key not in core}


def leaves(key: str, value: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield flat keys and values of a section, down to the known keys."""
    if key not in known and isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(f"{key}.{name}", item, known)
    else:
        yield key, json.loads(json.dumps(value, default=str))


def without_others(values: Mapping[str, Any], schema: type[Config], prefix: str = "") -> dict[str, Any]:
    """Return nested values without other recipes' keys that the schema lacks, where these have their defaults."""
    kept, others = {}, own_defaults()
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
    except (ValueError, RecursionError) as error:  # a list that holds itself has no end
        raise InputError(f"config.yaml: {error}") from error
    schema = schema_for(tree)
    config = validated(schema, without_others(tree, schema), problems)
    if problems:
        raise InputError([str(problem) for problem in problems])
    return config


def _without_gone(tree: Any, prefix: str = "") -> Any:
    """Return a recorded tree without the keys that this version of the code has no more."""
    if not isinstance(tree, dict):
        return tree
    kept = {name: value for name, value in tree.items() if f"{prefix}{name}" not in verl_names.table()["gone"]}
    return {name: _without_gone(value, f"{prefix}{name}.") for name, value in kept.items()}


def diff(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return flat key -> the two values, of the keys in which two configurations differ; a missing one is None."""
    first, second = convert.flat(one), convert.flat(other)
    keys = [*first, *(key for key in second if key not in first)]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}
