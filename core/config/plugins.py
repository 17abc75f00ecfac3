"""Finding a user's own function by the path that a configuration key names. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from core.errors import InputError


def load_object(spec: str, key: str = "") -> Any:
    """Return the object that ``package.module:name`` or ``path/to/file.py:name`` leads to.

    ``key`` is the configuration key the path came from; every error names it. A file is run once a
    process, however often it is named.

    Raises:
        InputError: the path has no ``:name``, the module or file does not exist, or it has no such name.
            An exception raised by the module's own code is passed on unchanged.
    """
    where, separator, name = spec.rpartition(":")
    label = f"{key}={spec}" if key else spec
    if not separator or not where or not name:
        raise InputError(f"{label}: write package.module:function or path/to/file.py:function")
    module = _from_file(where, label) if where.endswith(".py") else _from_package(where, label)
    if not hasattr(module, name):
        public = ", ".join(sorted(item for item in vars(module) if not item.startswith("_"))) or "nothing"
        raise InputError(f"{label}: {where} has no {name!r}; it has {public}")
    return getattr(module, name)


def chosen(name: str, known: Mapping[str, Any], key: str) -> Any:
    """Return a table's entry, or a user's own function: ``package.module:function`` or ``path/file.py:function``.

    Raises:
        InputError: neither a name of the table nor a path that leads to a function.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise InputError(
            f"{key}={name}: choose one of {', '.join(known)}, "
            "or name your own as package.module:function or path/file.py:function"
        )
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
    name = f"plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
