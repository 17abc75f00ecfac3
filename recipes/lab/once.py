"""Make a folder once, also where several processes need it at the same time. A folder that exists is complete.

The lab's base models are made through it. Callers put a hash of everything that decides the content into the name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder for this process; others that ask for it wait. A killed process holds nothing."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def built_once(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return ``root/name``, made by ``make(folder)`` where it is missing. ``root/current`` then points to it.

    Of several processes one makes it and the others wait for it; a killed one leaves nothing that counts.
    """
    folder = root / name
    with locked(root):
        if not folder.exists():
            partial = root / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            os.rename(partial, folder)
        link = root / "current.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, root / "current")
    return folder
