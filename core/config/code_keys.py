"""Code is named on the command line, never by a record, which may come from anybody.

A command that takes settings from a checkpoint or a file of answers calls :func:`refuse_code` before anything is
loaded. Whether the value of a key names code that runs is said by its field in the schema.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from core.config import convert, recipes
from core.config.composition import examine
from core.config.schema import Config
from core.config.section import ARGUMENTS, CODE, CONSENT, OWN_CODE, Limit, hints, mark, show, thaw
from core.errors import InputError


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
