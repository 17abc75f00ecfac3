"""Files that survive a kill or a power failure whole: written beside their place, put on disk, then renamed.

Whether a file that somebody else wrote is whole is the question of :mod:`core.files.whole_files`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"  # end of the name of a file that is being written


def fsync(path: Path) -> None:
    """Put a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Write a file and put it on disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write to; what is there at the end of the block replaces ``path`` as a whole.

    A reader, also after a kill, finds the old content or the new one. Nothing new is left where the block raises.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")  # two processes may write the same file
    try:
        yield partial
        fsync(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    fsync(path.parent)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's text as a whole. Raises OSError, and leaves nothing of the new text."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
