"""Imports of users' files from the files beside them, as in their own project.

A file that the configuration names is loaded by its path, while the run starts in another folder. Its relative imports
lead to its own folder and to those above it. An absolute import that no installed package answers is looked for in the
folders above the importing file, up to the root of its project, as if the run had started there; each such folder is
reported. This repository's own top-level names (``core``, ``tests``, ``environment``) are no installed packages: a
project that has a module of such a name gets its own. What is found so is loaded as a part of its folder, under a name
that says which one, so that two projects may each have their ``utils``. Packages above a file are entered without their
``__init__.py``: those of public projects import whole trainers.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from core.config import extensions

MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # of a project's root
REPORTED = "RLREPRO_NEIGHBOURS_REPORTED"  # in the environment of graders and workers, which import the same files again
IMPORTLIB = ("<frozen importlib", os.path.dirname(importlib.__file__))
REPOSITORY = Path(__file__).resolve().parents[2]


def folders_above(path: Path) -> list[Path]:
    """Return a file's folder and those above it up to the root of its project, the nearest first."""
    folders = list(path.parents)[:-1]
    roots = [at for at, folder in enumerate(folders) if any((folder / marker).exists() for marker in MARKERS)]
    return folders[: roots[0] + 1] if roots else folders


def holds_code(spec: ModuleSpec | None) -> bool:
    """Return whether a spec leads to Python files. A folder of runs named after a package, as wandb's, holds none."""
    if spec is None or spec.origin is not None:
        return spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return any(next(folder.glob(pattern), None) for folder in folders for pattern in ("*.py", "*/*.py"))


def places(spec: ModuleSpec | None) -> list[Path]:
    """Return the folders or the file that a spec leads to."""
    if spec is None:
        return []
    return [Path(place).resolve() for place in spec.submodule_search_locations or filter(None, [spec.origin])]


class UsersLoader(SourceFileLoader):
    """Runs a user's file, whose imports then lead to its own project (:func:`users_import`)."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": users_import}
        super().exec_module(module)
        ray = sys.modules.get("ray")
        if ray is not None:  # no actor can import users' files: what it gets is pickled whole
            tops = (sys.modules[top] for top in FINDER.users if top in sys.modules)
            for users in (module, *tops):
                ray.cloudpickle.register_pickle_by_value(users)


def for_users(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return a spec of a user's file with the loader of such files."""
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = UsersLoader(spec.loader.name, spec.loader.path)
    return spec


class ProjectFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of users' projects by the names that this module gives them."""

    def __init__(self) -> None:
        self.packages: dict[str, Path] = {}  # name that this module gave a folder of a project -> the folder
        self.users: set[str] = set()  # first names of the modules that are users', beside a stand-in's

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name in self.packages:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(self.packages[name])]
            return spec
        if not path or name.partition(".")[0] not in self.users:
            return None
        return for_users(PathFinder.find_spec(name, path)) or beside_stand_in(name)


class LastFinder(importlib.abc.MetaPathFinder):
    """Finds what users' files import by a text (``importlib.import_module``), as the last of the finders."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        importer = self.importing_file() if path is None else None
        for folder in folders_above(importer) if importer else ():
            if holds_code(spec := PathFinder.find_spec(name, [str(folder)])):
                FINDER.users.add(name)
                report(f"{importer} imports {name} from {folder}")
                return for_users(spec)
        return None

    def importing_file(self) -> Path | None:
        """Return the user's file whose import is being answered, or None for another's."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(IMPORTLIB):
            frame = frame.f_back
        names = frame.f_globals if frame else {}
        own = str(names.get("__name__")).partition(".")[0] in {*FINDER.users, *extensions.stand_ins()}
        return Path(names["__file__"]).resolve() if own and names.get("__file__") else None


class StandInLoader(importlib.abc.Loader):
    """Loads a stand-in's module for a file that is written to lie beside it in the package."""

    def __init__(self, function: str, module: str):
        self.function, self.module = function, module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module, _, function = self.function.partition(":")
        return getattr(importlib.import_module(module), function)(self.module)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: :meth:`create_module` returns a module that has its contents."""


def beside_stand_in(name: str) -> ModuleSpec | None:
    """Return the spec of a stand-in's module for a relative import that leads to nothing in the user's project.

    People publish files that are to be copied into a folder of the package, and import ``.base_tool`` in them.
    """
    package, _, last = name.rpartition(".")
    module = extensions.beside().get(last, "")
    top = module.partition(".")[0]
    if package not in FINDER.packages or not module or PathFinder.find_spec(top) is not None:
        return None
    report(f"{FINDER.packages[package]} has no {last}: {module} is imported in its place")
    return ModuleSpec(name, StandInLoader(extensions.stand_ins()[top], module), is_package=True)


FINDER, LAST = ProjectFinder(), LastFinder()


def install() -> None:
    """Let the imports of users' files reach their neighbours. A second call does nothing."""
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
        sys.meta_path.append(LAST)


def users_import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import for a statement in a user's file: ``__import__`` of its builtins."""
    file = (globals or {}).get("__file__")
    package = "" if level or not file else own_package(name, Path(file))
    if not package:
        return builtins.__import__(name, globals, locals, fromlist, level)
    try:
        importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:  # with the names that the user knows
        said, missing = (str(one).replace(f"{package}.", "") for one in (error, error.name))
        raise ModuleNotFoundError(said, name=missing) from error
    if fromlist:
        return builtins.__import__(f"{package}.{name}", globals, locals, fromlist, 0)
    return sys.modules[f"{package}.{name.partition('.')[0]}"]


@functools.cache
def own_package(name: str, file: Path) -> str:
    """Return the package of the folder that has a module which a user's file imports, or "" for one of another's.

    Raises ModuleNotFoundError for a module that the project has not, and of which this repository has the first name.
    """
    top, importer = name.partition(".")[0], file.resolve()
    if top in sys.stdlib_module_names or top in extensions.stand_ins():
        return ""
    elsewhere = found_elsewhere(top)
    code = holds_code(elsewhere)
    ours = (REPOSITORY / "pyproject.toml").exists() and any(one.parent == REPOSITORY for one in places(elsewhere))
    if code and not ours:
        return ""
    for folder in folders_above(importer):
        spec = PathFinder.find_spec(top, [str(folder)])
        if not holds_code(spec) or (code and not is_module(folder, name)):
            continue
        if code and elsewhere.origin and not spec.origin and is_module(REPOSITORY, name):
            continue  # as on Python's path, a package is before a mere folder
        if places(spec) == places(elsewhere):
            return ""
        report(f"{importer} imports {top} from {folder}" + (f", not this repository's {top}" if ours else ""))
        return package_for_imports(folder)
    if top in extensions.mounted() and (package := mounted_package(name, importer)):
        return package
    if ours and not (is_module(REPOSITORY, name) and (elsewhere.origin or "." in name)):
        raise ModuleNotFoundError(
            f"No module named {name!r} in the folders of {importer} and above it; {REPOSITORY / top} is this "
            "repository's own",
            name=name,
        )
    return ""


def found_elsewhere(name: str) -> ModuleSpec | None:
    """Return the spec of a module by the finders of other modules: of what is installed, or on the path."""
    for finder in sys.meta_path:
        if finder is not FINDER and finder is not LAST and (spec := finder.find_spec(name, None)) is not None:
            return spec
    return None


def is_module(folder: Path, name: str) -> bool:
    """Return whether a folder has a module, or a package, of this dotted name."""
    place = folder.joinpath(*name.split("."))
    return place.is_dir() or place.with_name(f"{place.name}.py").is_file()


def package_for_imports(folder: Path) -> str:
    """Return the package that stands for a folder from which a user's file imports."""
    name = f"imports_{_digest(folder)}"
    FINDER.users.add(name)
    FINDER.packages[name] = folder
    return name


def mounted_package(name: str, importer: Path) -> str:
    """Return the package that holds a project's root under its first name in imports, or "" where none fits.

    The files of verl-recipe import each other as ``recipe.<folder>``: their repository is a folder of that name in
    verl's.
    """
    top, _, module = name.partition(".")
    for folder in folders_above(importer) if module else ():
        if is_module(folder, module):
            report(f"{importer} imports {name} from {folder}, whose root is the package {top}")
            package = package_for_imports(folder.joinpath(top))
            FINDER.packages[f"{package}.{top}"] = folder
            return package
    return ""


def package_of(path: Path) -> str:
    """Return the package in which a user's file is loaded, so that its relative imports lead to its neighbours."""
    folders = folders_above(path)
    name = f"project_{_digest(folders[-1])}"
    FINDER.users.add(name)
    FINDER.packages[name] = folders[-1]
    for folder in folders[-2::-1]:
        name = f"{name}.{folder.name.replace('.', '_')}"
        FINDER.packages[name] = folder
    return name


def _digest(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode()).hexdigest()[:12]


def report(line: str) -> None:
    """Print a line once a run, whichever of its processes comes to it first."""
    if line not in os.environ.get(REPORTED, "").splitlines():
        os.environ[REPORTED] = f"{os.environ.get(REPORTED, '')}\n{line}"
        print(line, file=sys.stderr, flush=True)
