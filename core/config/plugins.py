"""Code that a configuration names: functions and classes by their paths, by a decorator's name, or by a table's.

A path is ``package.module:name`` or ``path/to/file.py:name``. The tables are those of :mod:`core.config.registry`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from core.config import neighbours, stand_ins
from core.errors import InputError

PREFIX = "plugin_"  # of the name of a module that is a user's file, behind its package's
_REGISTERED: dict[str, dict[str, Any]] = {}  # key of the configuration -> name -> a user's own, by decorator


def registering(key: str, known: Mapping[str, Any], name: str) -> Callable[[Any], Any]:
    """Return a decorator that gives a class or function of a user's module a name for a key.

    Raises InputError for a name that is the table's (``known``), another module's, or no identifier.
    """

    def register(target: Any) -> Any:
        names = _REGISTERED.setdefault(key, {})
        holder = "core.config.registry" if name in known else getattr(names.get(name), "__module__", target.__module__)
        module, holder_name = (one[max(one.rfind(PREFIX), 0) :] for one in (target.__module__, holder))
        if holder != target.__module__:
            raise InputError(f"{key}: {module} registers {name!r}, a name of {holder_name}; choose another")
        if not name.isidentifier():
            raise InputError(f"{key}: {module} registers {name!r}; a name has letters, digits and _ alone")
        names[name] = target
        return target

    return register


def registered(key: str) -> Mapping[str, Any]:
    """Return what the modules loaded so far have registered for a key, by name."""
    return _REGISTERED.get(key, {})


def load_object(spec: str, key: str = "") -> Any:
    """Return the object that ``package.module:name`` or ``path/to/file.py:name`` leads to.

    ``key`` is the configuration key the path came from; every error names it, and a name that a decorator registered
    for it will do as well. A file is run once a process, however often it is named.

    Raises:
        InputError: the path has no ``:name``, the module or file does not exist, or it has no such name.
            An exception raised by the module's own code is passed on unchanged.
    """
    where, separator, name = spec.rpartition(":")
    label = f"{key}={spec}" if key else spec
    if not separator or not where or not name:
        raise InputError(f"{label}: write package.module:function or path/to/file.py:function")
    module = load_module(where, label)
    if not hasattr(module, name):
        if name in registered(key):
            return registered(key)[name]
        public = ", ".join(sorted(item for item in vars(module) if not item.startswith("_"))) or "nothing"
        raise InputError(f"{label}: {where} has no {name!r}; it has {public}")
    return getattr(module, name)


def load_module(where: str, label: str) -> ModuleType:
    """Return the module ``package.module`` or ``path/to/file.py``. Raises InputError, which begins with ``label``."""
    stand_ins.install()
    neighbours.install()
    return _from_file(where, label) if where.endswith(".py") else _from_package(where, label)


def in_project(where: str, file: Path) -> str:
    """Return ``file.py:Class`` for a ``package.module.Class`` that only the project of a file has, else ``where``.

    A file that names classes so is written to be read in its project's root, as verl's lists of tools are. What can be
    imported from here comes first. A folder ``src`` of the project counts as a root, and so does a clone of the
    package within it.
    """
    module, _, name = where.rpartition(".")
    if ":" in where or not module or importable(module):
        return where
    parts = module.split(".")
    for folder in neighbours.folders_above(file.expanduser().resolve()):
        for place in (root.joinpath(*parts) for root in (folder, folder / "src", folder / parts[0])):
            for found in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                if found.is_file():
                    neighbours.report(f"{file} names {where}: it is taken from {found}")
                    return f"{found}:{name}"
    return where


def importable(module: str) -> bool:
    """Return whether a module is installed, on the path, or a stand-in's."""
    stand_ins.install()
    if stand_ins.stands_in(module):
        return stand_ins.FINDER.offers(module)
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def absent(error: ModuleNotFoundError) -> str:
    """Return what to do about a module that a user's file imports and that is not there."""
    return f"install {error.name}, or put the folder that holds it into PYTHONPATH"


def chosen(name: str, known: Mapping[str, Any], key: str) -> Any:
    """Import the function of an entry of :mod:`core.config.registry`, or a user's own by its path or registered name.

    Raises:
        InputError: neither a known name nor a path that leads to a function.
    """
    if name in known:
        return load_object(known[name].function)
    if name in registered(key):
        return registered(key)[name]
    if ":" not in name:
        choose = f"choose one of {', '.join((*known, *registered(key)))}, or " if known else ""
        raise InputError(f"{key}={name}: {choose}name your own as package.module:function or path/file.py:function")
    return load_object(name, key)


def _from_package(name: str, label: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that the module itself imports and lacks is another error than a module that is not there.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise InputError(
            f"{label}: no module {error.name!r} on the import path; "
            "run from the repository root, or name the file: path/to/file.py:function"
        ) from error


def _from_file(where: str, label: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise InputError(f"{label}: there is no file {path}; the path counts from the working directory {Path.cwd()}")
    name = f"{PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    name = f"{stand_ins.package_of(path) or neighbours.package_of(path)}.{name}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=neighbours.UsersLoader(name, str(path)))
    spec.submodule_search_locations = None  # of an __init__.py too: its relative imports lead to its folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
