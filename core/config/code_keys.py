"""The keys that name code which runs, and the one rule about them: it is the command line that names code.

A run's settings travel: a checkpoint and a file of answers hold them, and may come from anybody. A command
that takes settings from one calls :func:`refuse` before anything is loaded. ``code_keys.yaml`` has the kind of every
key that can hold text.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.config import convert, recipes, roles
from core.config.checked import examine
from core.config.frozen import thaw
from core.config.problem import show
from core.config.schema import Config
from core.config.section import is_choice
from core.config.yaml_files import read_table
from core.errors import InputError

FILE, PRESET = "code_keys.yaml", "preset"
CONSENT, CODE, PLUGIN, ARGUMENTS, DATA = "consent", "code", "plugin", "arguments", "data"

# kind -> whether a value (of a mapping, the one of this name in it) names code
NAMES_CODE: Mapping[str, Callable[[str, Any], bool]] = {
    CONSENT: lambda name, value: bool(value) and name in ("trust_remote_code", "allow_unisolated"),
    CODE: lambda name, value: value not in (None, ""),
    PLUGIN: lambda name, value: isinstance(value, str) and ":" in value,
    ARGUMENTS: lambda name, value: value is True or isinstance(value, str),
    DATA: lambda name, value: False,
}


@functools.cache
def table() -> dict[str, str]:
    """Return key -> kind, of the core's keys and those of recipes."""
    tables = [read_table(Path(__file__).with_name(FILE))]
    tables += [entries for recipe, _ in recipes.extended() if (entries := recipes.table(recipe, FILE)) is not None]
    return {key: kind for one in tables for key, kind in roles.entries(one)}


def named(config: Config) -> dict[str, Any]:
    """Return flat key -> value of all that names code in a configuration; of a mapping each value that does."""
    named_code, default = {}, type(config)()
    for key, value in convert.flat(config).items():
        # A key that the table lacks: a number or a choice among names cannot, anything else counts as naming code
        free = isinstance(value, str | Mapping | tuple) and not is_choice(convert.all_keys(type(config))[key])
        kind = table().get(key, ARGUMENTS if free else DATA)
        usual = dict(_values(key, convert.get(default, key)))
        for name, one in _values(key, value):
            if one != usual.get(name) and any(NAMES_CODE[kind](*item) for item in _items(name.rpartition(".")[2], one)):
                named_code[name] = thaw(one)
    return named_code


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
    return named(examine(recipe, overrides).config)


def refuse(
    artefact: str, config: Config, recipe: str, overrides: Sequence[str] = (), unread: Sequence[str] = ()
) -> None:
    """Check that ``config``, into which settings of an artefact went, names no code of its own accord.

    What the ``overrides`` of the command line name is the user's word, and what the recipe's own files name (its
    presets included) is this repository's. Keys that begin with one of ``unread`` are left out: the command loads
    nothing that they name.

    Raises InputError: the artefact, the keys, and what to append to the command.
    """
    unnamed = {key: value for key, value in named(config).items() if not key.startswith(tuple(unread))}
    presets = sorted(path.stem for path in (recipes.folder(recipe) / PRESET).glob("*.yaml"))
    for texts in (tuple(overrides), *((f"{PRESET}={name}",) for name in presets)):
        if unnamed:
            allowed = _named_by(recipe, texts)
            unnamed = {key: value for key, value in unnamed.items() if key not in allowed or allowed[key] != value}
    if unnamed:
        append = " ".join(shlex.quote(f"{key}={show(value)}") for key, value in unnamed.items())
        raise InputError(
            f"{artefact}: its settings name code that would run here: {', '.join(unnamed)}. They may come from "
            f"anybody, and code is named on the command line alone. If you trust that code, append {append}"
        )
