"""Imports of users' files from the files beside them, as in their own project.

A file that the configuration names is loaded by its path, while the run starts in another folder. Its relative imports
lead to its own folder and to those above it. An absolute import that nothing else answers is looked for in the folders
above the importing file, up to the root of its project, as if the run had started there; each such folder is reported.
Packages above a file are entered without their ``__init__.py``: those of public projects import whole trainers.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.config import extensions

MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # of a project's root
REPORTED = "RLREPRO_NEIGHBOURS_REPORTED"  # in the environment of graders and workers, which import the same files again
IMPORTLIB = ("<frozen importlib", os.path.dirname(importlib.__file__))


def folders_above(path: Path) -> list[Path]:
    """Return a file's folder and those above it up to the root of its project, the nearest first."""
    folders = list(path.parents)[:-1]
    roots = [at for at, folder in enumerate(folders) if any((folder / marker).exists() for marker in MARKERS)]
    return folders[: roots[0] + 1] if roots else folders


def holds_code(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Return whether a spec leads to Python files. A folder of runs named after a package, as wandb's, holds none."""
    if spec is None or spec.origin is not None:
        return spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return any(next(folder.glob(pattern), None) for folder in folders for pattern in ("*.py", "*/*.py"))


class NeighbourFinder(importlib.abc.MetaPathFinder):
    """Finds what users' files import from their own project, as the last of the finders: what is installed is first."""

    def __init__(self) -> None:
        self.packages: dict[str, Path] = {}  # name that this module gave a folder of a user's file -> the folder
        self.users: set[str] = set()  # first names of the modules that are users', beside a stand-in's

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self.packages:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(self.packages[name])]
            return spec
        importer = self.importing_file() if path is None else None
        for folder in folders_above(importer) if importer else ():
            if holds_code(spec := importlib.machinery.PathFinder.find_spec(name, [str(folder)])):
                self.users.add(name)
                report(f"{importer} imports {name} from {folder}")
                return spec
        return None

    def importing_file(self) -> Path | None:
        """Return the user's file whose import is being answered, or None for another's."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(IMPORTLIB):
            frame = frame.f_back
        names = frame.f_globals if frame else {}
        own = str(names.get("__name__")).partition(".")[0] in {*self.users, *extensions.stand_ins()}
        return Path(names["__file__"]).resolve() if own and names.get("__file__") else None


FINDER = NeighbourFinder()


def install() -> None:
    """Let the imports of users' files reach their neighbours. A second call does nothing."""
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)


def package_of(path: Path) -> str:
    """Return the package in which a user's file is loaded, so that its relative imports lead to its neighbours."""
    folders = folders_above(path)
    name = f"project_{hashlib.sha256(str(folders[-1]).encode()).hexdigest()[:12]}"
    FINDER.users.add(name)
    FINDER.packages[name] = folders[-1]
    for folder in folders[-2::-1]:
        name = f"{name}.{folder.name.replace('.', '_')}"
        FINDER.packages[name] = folder
    return name


def report(line: str) -> None:
    """Print a line once a run, whichever of its processes comes to it first."""
    if line not in os.environ.get(REPORTED, "").splitlines():
        os.environ[REPORTED] = f"{os.environ.get(REPORTED, '')}\n{line}"
        print(line, file=sys.stderr, flush=True)
