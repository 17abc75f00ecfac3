"""Trees to typed configurations: composed ones, and those that a run, a checkpoint or a file of answers recorded.

What a change of a key means (its role), and whether its value names code that runs, is said by its field in the
schema. Resuming (``core/checkpoint``) refuses another objective; comparing runs (``results/reporting``) leaves
bookkeeping out. A record may come from anybody, so that it is the command line that names code: a command that takes
settings from a record calls :func:`refuse_code` before anything is loaded.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from core.config import convert, recipes, verl_names
from core.config.defaults import resolve
from core.config.problem import Problem, show
from core.config.schema import Config
from core.config.secret_keys import without_hidden
from core.config.section import (
    ARGUMENTS,
    CODE,
    CONSENT,
    IDENTITY,
    MAPPING,
    OWN_CODE,
    Limit,
    build,
    hints,
    is_section,
    mark,
    thaw,
)
from core.config.verl_names import CommandLine, unknown_key
from core.errors import InputError


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
def _of_recipes() -> dict[str, Any]:
    """Return flat key -> default, of every recipe's own keys."""
    own = [convert.as_json(schema()) for schema in schemas()[1:]]
    return {key: value for values in own for key, value in values.items() if key not in convert.all_keys(Config)}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield flat keys and values (as JSON has them) of a configuration, nested or flat, down to the known keys."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in _of_recipes() and not convert.known(key):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, json.loads(json.dumps(value, default=str))


def schema_for(values: Mapping[str, Any]) -> type[Config]:
    """Return the schema that lacks fewest of the sections, then of the keys, of a nested or flat configuration."""
    sections, usual = {key.partition(".")[0] for key in values}, _of_recipes()
    set_keys = {key for key, value in _leaves(values) if key in usual and value != usual[key]}
    return min(
        schemas(), key=lambda one: (len(sections - hints(one).keys()), len(set_keys - convert.all_keys(one).keys()))
    )


def own_tree(values: Mapping[str, Any], schema: type[Config]) -> dict[str, Any]:
    """Return a recorded configuration as a tree of what the schema has.

    Left out are keys that are gone since it was written, secrets, which it does not hold, and keys of other recipes
    where these have their defaults: every recipe had them once.
    """
    tree: dict[str, Any] = {}
    gone, usual = verl_names.table()["gone"], _of_recipes()
    for key, value in _leaves(without_hidden(values)):
        others_default = not convert.known(key, schema) and key in usual and usual[key] == value
        *parents, name = parts = key.split(".")
        is_gone = any(".".join(parts[:depth]) in gone for depth in range(1, len(parts) + 1))
        if not is_gone and not others_default:
            functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[name] = value
    return tree


def from_yaml(text: str) -> Config:
    """Return the configuration that ``convert.to_yaml`` wrote, in the schema that fits it best.

    Raises InputError: a key or a value is not the schema's.
    """
    problems: list[Any] = []
    try:
        values = convert.read_yaml(text)
        if not isinstance(values, Mapping):
            raise ValueError("holds no keys")
        schema = schema_for(values)
        config = validated(schema, own_tree(values, schema), problems)
    except (ValueError, RecursionError) as error:  # a list that holds itself has no end
        raise InputError(f"config.yaml: {error}") from error
    if problems:
        raise InputError([str(problem) for problem in problems])
    return config


def completed(values: Mapping[str, Any], schema: type[Config], recipe: str = "") -> dict[str, Any]:
    """Return flat key -> value (as JSON has it) of a configuration that any version wrote, nested or flat.

    A key that ``values`` lacks has its default, which may follow from others. So two versions' records of the same
    settings are equal.
    """
    problems: list[Problem] = []
    complete = convert.as_json(resolve(validated(schema, own_tree(values, schema), problems), recipe))
    return complete | dict(_leaves({problem.key: problem.value for problem in problems}))


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


# --- code ---


def names_code(kind: str, name: str, value: Any) -> bool:
    """Return whether a value names code; ``name`` is the key, or that within a mapping, under which it stands."""
    if isinstance(value, Mapping):
        return any(names_code(kind, key, item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(names_code(kind, name, item) for item in value)
    if kind == CONSENT:
        return bool(value) and name in ("trust_remote_code", "allow_unisolated")
    if kind == ARGUMENTS:
        return value is True or isinstance(value, str)
    if kind == CODE:
        return value not in (None, "")
    return kind == "plugin" and isinstance(value, str) and ":" in value  # other texts are names of tables here


def kind_of(key: str, schema: type[Config]) -> str:
    """Return which values of a key name code (see :func:`names_code`), or nothing where none does."""
    section, _, name = key.rpartition(".")
    section = convert.sections(schema)[section] if section else schema
    hint = hints(section)[name]
    limits = [part for one in (hint, *get_args(hint)) for part in get_args(one) if isinstance(part, Limit)]
    return mark(section, name, "code") or ("plugin" if any(OWN_CODE in limit.rule for limit in limits) else "")


def code_in(config: Config) -> dict[str, Any]:
    """Return flat key -> value of all that names code in a configuration; of a mapping each entry that does."""
    found: dict[str, Any] = {}
    usual = type(config)()
    for key, value in convert.flat(config).items():
        if (kind := kind_of(key, type(config))) and value != convert.get(usual, key):
            entries = _entries(key, value)
            found |= {name: thaw(one) for name, one in entries if names_code(kind, name.rpartition(".")[2], one)}
    return found


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield flat keys and values, of mappings within mappings too."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entries(f"{key}.{name}", item)
    else:
        yield key, value


@functools.cache
def _named_by(recipe: str, overrides: tuple[str, ...]) -> Mapping[str, Any]:
    from core.config.composition import examine  # Hydra: half a second that reading a configuration need not pay

    return code_in(examine(recipe, overrides).config)


def refuse_code(
    artefact: str, config: Config, recipe: str, overrides: Sequence[str] = (), unread: Sequence[str] = ()
) -> None:
    """Check that ``config``, into which settings of an artefact went, names no code of its own accord.

    What the ``overrides`` of the command line name is the user's word, and what the recipe's own files name (its
    presets included) is this repository's. Keys that begin with one of ``unread`` are left out: the command loads
    nothing that they name.

    Raises InputError: the artefact, the keys, and what to append to the command.
    """
    unnamed = {key: value for key, value in code_in(config).items() if not key.startswith(tuple(unread))}
    presets = sorted(path.stem for path in (recipes.folder(recipe) / "preset").glob("*.yaml"))
    for texts in (tuple(overrides), *((f"preset={name}",) for name in presets)):
        if unnamed:
            allowed = _named_by(recipe, texts)
            unnamed = {key: value for key, value in unnamed.items() if key not in allowed or allowed[key] != value}
    if unnamed:
        append = " ".join(shlex.quote(f"{key}={show(value)}") for key, value in unnamed.items())
        raise InputError(
            f"{artefact}: its settings name code that would run here: {', '.join(unnamed)}. They may come from "
            f"anybody, and code is named on the command line alone. If you trust that code, append {append}"
        )
