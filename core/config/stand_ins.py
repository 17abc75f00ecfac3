"""Packages that users' files import and that are not installed: an extension may offer a stand-in for one.

The finder of this module comes last in ``sys.meta_path``, so that an installed package is always preferred, and it is
added when the first file of a user is loaded. Nothing is written to disk. A file that lies in a fork of such a package
imports from the fork what the stand-in does not have; each such module is reported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from core.config import extensions
from core.config.neighbours import UsersLoader, folders_above, for_users, report

FORKS: set[Path] = set()  # folders of packages in the forks that users' files lie in


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of packages that extensions offer (:attr:`core.config.extensions.Extension.stand_ins`)."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in extensions.stand_ins():
            return None
        spec = find_in_forks(name)
        if spec is not None and not self.offers(name):
            report(f"{name} is not part of its stand-in: {spec.origin or spec.name} is imported from the user's fork")
            return spec
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def offers(self, name: str) -> bool:
        try:
            self.create_module(importlib.machinery.ModuleSpec(name, self))
        except ImportError:
            return False
        return True

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module, _, function = extensions.stand_ins()[spec.name.partition(".")[0]].partition(":")
        return getattr(importlib.import_module(module), function)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: :meth:`create_module` returns a module that has its contents."""


def stands_in(module: str) -> bool:
    """Return whether a module is one of a package that is not installed and has a stand-in."""
    top = module.partition(".")[0]
    return top in extensions.stand_ins() and importlib.machinery.PathFinder.find_spec(top) is None


def fork_of(path: Path) -> Path | None:
    """Return the folder of a stand-in's package in the project of a file, as in a fork of the package, or None."""
    for folder in folders_above(path):
        for name in extensions.stand_ins():
            for place in (folder / name, folder / name / name):  # a clone within a project has the package's name too
                if (place / "__init__.py").is_file():
                    return place
            if folder.name == name:
                return folder
    return None


def package_of(path: Path) -> str:
    """Return the package of a file that lies in a fork of a stand-in's package, or "".

    Relative imports in such a file then lead to the stand-in, and where that has nothing to the fork.
    """
    fork = fork_of(path)
    if fork is not None:
        FORKS.add(fork)
    if fork not in path.parents:
        return ""
    return ".".join(path.parent.relative_to(fork.parent).parts)


def find_in_forks(name: str, forks: Sequence[Path] | None = None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module in the forks of users' files, or None."""
    package, *folders = name.split(".")
    for fork in FORKS if forks is None else forks:
        if fork.name == package and folders:
            place = fork.joinpath(*folders[:-1])
            if (spec := importlib.machinery.PathFinder.find_spec(name, [str(place)])) is not None:
                return for_users(spec)
    return None


def fork_module(name: str) -> ModuleType | None:
    """Return a fork's version of a module that the stand-in has too, for the names that this one lacks, or None."""
    own = f"{name}__fork"
    if own in sys.modules:
        return sys.modules[own]
    spec = find_in_forks(name)
    if spec is None or spec.origin is None:
        return None
    spec = importlib.util.spec_from_file_location(own, spec.origin, loader=UsersLoader(own, spec.origin))
    report(f"{name} lacks names in its stand-in: they are imported from {spec.origin}")
    module = sys.modules[own] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FINDER = StandInFinder()


def install() -> None:
    """Let the imports of users' files reach the stand-ins. A second call does nothing."""
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)
