"""Configurations that a run, a checkpoint or a file of answers recorded: comparing them, and refusing code.

What a change of a key means (its role), and whether its value names code that runs, is said by its field in the
schema. Resuming (``core/checkpoint``) refuses another objective; comparing runs (``results/reporting``) leaves
bookkeeping out. A record may come from anybody, so that it is the command line that names code: a command that takes
settings from a record calls :func:`refuse_code` before anything is loaded.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from core.config import convert, recipes
from core.config.checked import examine, leaves, own_defaults, schemas, validated, without_others
from core.config.defaults import resolve
from core.config.limits import Limit
from core.config.problem import Problem, show
from core.config.schema import Config
from core.config.section import ARGUMENTS, CODE, CONSENT, IDENTITY, Section, hints, mark, thaw
from core.errors import InputError

# kind -> whether a value (of a mapping, the one of this name in it) names code
NAMES_CODE = {
    CONSENT: lambda name, value: bool(value) and name in ("trust_remote_code", "allow_unisolated"),
    CODE: lambda name, value: value not in (None, ""),
    "plugin": lambda name, value: isinstance(value, str) and ":" in value,  # other texts are names of tables here
    ARGUMENTS: lambda name, value: value is True or isinstance(value, str),
}


# --- roles ---


def role_of(key: str) -> str:
    """Return the role of a flat key, or of one inside a user's own mapping; IDENTITY where no schema has it."""
    for section in schemas():
        role = None
        for name in key.split("."):
            if name not in section.model_fields:
                break
            role = mark(section, name, "role") or role
            section = hints(section)[name]
            if not (isinstance(section, type) and issubclass(section, Section)):
                return role or IDENTITY
    return IDENTITY


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
        complete |= dict(leaves(problem.key, problem.value, own_defaults()))
    return complete


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


# --- code ---


def kind_of(key: str, schema: type[Config]) -> str:
    """Return which values of a key name code, a kind of NAMES_CODE, or nothing where none does."""
    *above, name = key.split(".")
    section = convert.sections(schema)[".".join(above)] if above else schema
    hint = hints(section)[name]
    rules = [part.rule for one in (hint, *get_args(hint)) for part in get_args(one) if isinstance(part, Limit)]
    own_function = any("your own as package.module" in rule for rule in rules)
    return mark(section, name, "code") or ("plugin" if own_function else "")


def code_in(config: Config) -> dict[str, Any]:
    """Return flat key -> value of all that names code in a configuration; of a mapping each value that does."""
    found, default = {}, type(config)()
    for key, value in convert.flat(config).items():
        if names_code := NAMES_CODE.get(kind_of(key, type(config))):
            usual = dict(_values(key, convert.get(default, key)))
            for name, one in _values(key, value):
                pairs = _items(name.rpartition(".")[2], one)
                if one != usual.get(name) and any(names_code(*pair) for pair in pairs):
                    found[name] = thaw(one)
    return found


def _values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield flat keys and values, of mappings within mappings too."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _values(f"{key}.{name}", item)
    else:
        yield key, value


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a sequence holds, with the name that it stands under, down to what holds nothing else."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _items(key, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _items(name, item)
    else:
        yield name, value


@functools.cache
def _named_by(recipe: str, overrides: tuple[str, ...]) -> Mapping[str, Any]:
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
