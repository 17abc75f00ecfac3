"""Code that a configuration names by its path: ``package.module:name`` or ``path/to/file.py:name``.

A file is imported with its own folder and its project's root (the nearest folder above with one of
:data:`MARKERS`) on ``sys.path``, until the import ends, so import what you need at the top of the
file. Graders import a file again; what goes to Ray actors is pickled by value, because no actor
could import it.
"""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from core.errors import InputError

MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # of a project's root
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "recipes", "reward_scores", "data_preprocess", "results", "tests")
INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
# Folders of code that is not the user's: this repository's packages, Python, what is installed
OTHERS = [*(ROOT / name for name in PACKAGES), *(Path(path).resolve() for path in INSTALLED)]


def load_object(spec: str, key: str = "", beside: Path | None = None) -> Any:
    """Return the object that ``package.module:name`` or ``path/to/file.py:name`` leads to.

    ``key`` is the configuration key that holds the path. ``beside`` is a file whose project may
    hold the module. Raises InputError: no ``:name``, no such module or file, or no such name in it.
    """
    where, _, name = spec.rpartition(":")
    label = f"{key}={spec}" if key else spec
    if not where or not name:
        raise InputError(f"{label}: write package.module:function or path/to/file.py:function")
    module = load_module(where, label, beside)
    if not hasattr(module, name):
        raise InputError(f"{label}: {where} has no {name!r}; name one of its functions or classes")
    return getattr(module, name)


def load_module(where: str, label: str, beside: Path | None = None) -> ModuleType:
    """Return the module ``package.module``, or ``path/to/file.py``, which is run once.

    Raises InputError, which begins with ``label``.
    """
    if where.endswith(".py"):
        return _from_file(where, label)
    with importing_from(beside.expanduser().resolve()) if beside else nullcontext():
        try:
            return importlib.import_module(where)
        except SystemExit as error:
            raise InputError(_exited(label, where, error)) from error
        except ModuleNotFoundError as error:
            # Only the module itself: one that it imports and lacks is another error
            if not error.name or not f"{where}.".startswith(f"{error.name}."):
                raise
            fix = "run from the repository root, or name the file: path/to/file.py:function"
            rule = f"no module {error.name!r} on the import path"
            raise InputError(f"{label}: {rule}; {fix}") from error


def _exited(label: str, module: object, error: SystemExit) -> str:
    return (
        f"{label}: importing {module} ended with SystemExit({error.code}); put what it runs under "
        "if __name__ == '__main__'"
    )


def absent(error: ModuleNotFoundError) -> str:
    """Return what to do about a module that a user's file imports and that is not there."""
    return f"install {error.name}, or put its folder into PYTHONPATH"


def is_own(file: str) -> bool:
    """Return whether a file of code is a user's: not this repository's, Python's or a package's."""
    path = Path(file).resolve()
    return path.is_file() and not any(path.is_relative_to(folder) for folder in OTHERS)


def _from_file(where: str, label: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        fix = f"the path counts from the working directory {Path.cwd()}"
        raise InputError(f"{label}: there is no file {path}; {fix}")
    # The path is part of the name, so that two files of the same name do not collide
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look their own module up
    try:
        with importing_from(path):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):
            raise InputError(_exited(label, path, error)) from error
        raise
    _pickle_by_value(module)
    return module


@contextmanager
def importing_from(file: Path) -> Iterator[None]:
    """Put a file's folder and its project's root first on ``sys.path`` while it is imported.

    A folder ``src`` in the root is put there too.
    """
    folders = [file.parent]
    for folder in file.parents:
        if any((folder / marker).exists() for marker in MARKERS):
            folders += [folder, folder / "src"]
            break
    paths = list(dict.fromkeys(map(str, folders)))
    known = set(sys.modules)
    importlib.invalidate_caches()
    sys.path[:0] = paths
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        for name in set(sys.modules) - known:
            if is_own(str(getattr(sys.modules[name], "__file__", None))):
                _pickle_by_value(sys.modules[name])


def _pickle_by_value(module: ModuleType) -> None:
    if (ray := sys.modules.get("ray")) is not None:
        ray.cloudpickle.register_pickle_by_value(module)
