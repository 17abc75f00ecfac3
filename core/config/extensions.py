"""What a folder of ``core/extensions`` adds to the kernel. The kernel finds the folders and imports none by name.

``core/extensions/<name>/extension.py`` declares ``EXTENSION``, an :class:`Extension`: keys of the configuration, rules
on them, entries of tables, and functions by their paths (``module:name``), which are imported when a configuration
requires them. The declaration itself imports nothing heavy. A folder that is deleted takes all of it along.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.config.rulebook import RuleBook
from core.config.section import Section
from core.config.yaml_files import read_table
from core.errors import InputError

PACKAGES = (
    "core.extensions.environments",
    "core.extensions.verl_classes",
    "core.extensions.verl_data",
    "core.extensions.verl_tools",
)


@dataclass(frozen=True)
class Extension:
    """Everything that one extension adds.

    keys: section of the configuration ("trainer", "actor_rollout_ref.rollout") -> a class with the keys that it adds.
    view: short name in rules -> section, as in ``core/config/view.py``.
    derived: key -> what a null value of it stands for.
    tables: name of a table in ``core/config/registry.py`` -> the entries that it adds.
    files: of a configuration, (key, path) of the files that its keys name and that must exist.
    checked_at_start: of a configuration, lines on what only a start can check.
    functions: name -> "module:name" of a function that the kernel calls by this name (:func:`functions`).
    stand_ins: package that users' files import -> "module:function" that returns a module of it by its name, used where
        the package is not installed (:mod:`core.config.stand_ins`).
    mounted: packages that users' files import and that are the root of their repository, under another name of its own.
    beside: name in a relative import of a user's file -> module of a stand-in, for files that are written to lie beside
        that module and do not.
    used: whether a configuration asks for the functions.
    """

    name: str
    keys: Mapping[str, type[Section]] = field(default_factory=dict)
    rules: RuleBook = field(default_factory=RuleBook)
    view: Mapping[str, str] = field(default_factory=dict)
    derived: tuple[tuple[str, Callable[[Section], Any]], ...] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Callable[[Section], Iterable[tuple[str, str]]] = lambda config: ()
    checked_at_start: Callable[[Section], Iterable[str]] = lambda config: ()
    functions: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    mounted: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    used: Callable[[Section], bool] = lambda config: True


@functools.cache
def found() -> tuple[Extension, ...]:
    """Return what the packages of ``PACKAGES`` declare."""
    return tuple(importlib.import_module(f"{name}.extension").EXTENSION for name in PACKAGES)


def entries(table: str) -> dict[str, Any]:
    """Return the entries that extensions add to a table of ``core/config/registry.py``."""
    return {name: entry for one in found() for name, entry in one.tables.get(table, {}).items()}


def stand_ins() -> dict[str, str]:
    """Return package -> "module:function" of all stand-ins that extensions offer."""
    return {package: path for one in found() for package, path in one.stand_ins.items()}


def mounted() -> set[str]:
    """Return the packages that are the root of users' repositories."""
    return {package for one in found() for package in one.mounted}


def beside() -> dict[str, str]:
    """Return name in a relative import -> module of a stand-in, of all extensions."""
    return {name: module for one in found() for name, module in one.beside.items()}


def functions(name: str, config: Section | None = None) -> list[Callable[..., Any]]:
    """Import and return the functions that extensions have under a name; of those that ``config`` asks for."""
    having = [one for one in found() if name in one.functions and (config is None or one.used(config))]
    return [_imported(one.functions[name]) for one in having]


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def function(name: str) -> Callable[..., Any]:
    """Import and return the function that one extension has under a name. Raises InputError where none has it."""
    if not (those := functions(name)):
        raise InputError(f"core/extensions: no folder there has {name}, which this configuration asks for; restore it")
    return those[0]


def extended(section: str) -> Callable[[type[Section]], Any]:
    """Return a decorator that adds the keys of extensions to the class of a section."""

    def extend(base: type[Section]) -> type[Section]:
        added = tuple(one.keys[section] for one in found() if section in one.keys)
        names = {"__module__": base.__module__, "__doc__": base.__doc__}
        return type(base.__name__, (*added, base), names) if added else base

    return extend


def tables(name: str) -> list[Any]:
    """Return what the extensions' files of this name hold, ``key_roles.yaml`` say."""
    folders = (Path(importlib.import_module(name).__file__).parent for name in PACKAGES)
    return [read_table(folder / name) for folder in folders if (folder / name).exists()]


def config_folders() -> list[Path]:
    """Return the folders of configuration files that defaults lists of users' files may name."""
    folders = (Path(importlib.import_module(name).__file__).parent / "config" for name in PACKAGES)
    return [folder for folder in folders if folder.is_dir()]
