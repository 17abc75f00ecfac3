"""Packages that users' files import and that are not installed: an extension may offer a stand-in for one.

The finder of this module comes last in ``sys.meta_path``, so that an installed package is always preferred, and it is
added when the first file of a user is loaded. Nothing is written to disk.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from core.config import extensions


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of packages that extensions offer (:attr:`core.config.extensions.Extension.stand_ins`)."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in extensions.stand_ins():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module, _, function = extensions.stand_ins()[spec.name.partition(".")[0]].partition(":")
        return getattr(importlib.import_module(module), function)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: :meth:`create_module` returns a module that has its contents."""


def package_of(path: Path) -> str:
    """Return the package of a file that lies in a folder of a stand-in's package, as in a fork of it, or "".

    Relative imports in such a file then lead to the stand-in.
    """
    folders = path.parent.parts
    starts = [at for at, name in enumerate(folders) if name in extensions.stand_ins()]
    return ".".join(folders[starts[-1] :]) if starts else ""


FINDER = StandInFinder()


def install() -> None:
    """Let the imports of users' files reach the stand-ins. A second call does nothing."""
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)
