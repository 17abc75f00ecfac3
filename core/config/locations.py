"""Paths and URLs that a configuration names. A path is used as it is; ``core.files.remote`` is imported for a URL."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)  # S3:// is no folder either: no driver has that name


def is_url(text: str | Path) -> bool:
    """Return whether a text is a URL, and neither a path nor a hub id."""
    return URL.match(str(text)) is not None


def name_of(url: str) -> str:
    """Return the last part of a URL: the name of the file or folder."""
    return url.rstrip("/").rpartition("/")[2]


def written_here(text: str) -> Path:
    """Return the path of a command's output, as argparse's ``type``.

    Raises ArgumentTypeError for a URL: pathlib would make a folder named ``s3:`` of it.
    """
    if is_url(text):
        raise ArgumentTypeError(f"{text}: this is written to this machine alone; give a path, and copy it afterwards")
    return Path(text)


def local_path(path: str | Path, key: str = "", *, without: tuple[str, ...] = ()) -> str:
    """Return a path as it is, and for a URL that of its copy on this node, made first if need be.

    Every call in a process returns the same copy, whatever changes at the URL meanwhile. Of a folder, files whose names
    match ``without`` are left out. Raises InputError, which names ``key``.
    """
    path = str(path)
    if not is_url(path):
        return path
    from core.files.remote.cache import local_copy

    return local_copy(path, key or "URL", without)


def url_problem(url: str, key: str, *, look: bool) -> tuple[str, str] | None:
    """Return which rule a URL breaks and what to do; None where none. With ``look`` the place itself is looked up."""
    from core.files.remote import urls

    return urls.url_problem(url, key, look)


def check_writable(path: str, key: str) -> None:
    """Check that the folder at a URL can be written. Raises InputError, which names ``key``."""
    if is_url(path):
        from core.files.remote import writing

        writing.check_writable(path, key)


def write_remote_text(url: str, key: str, name: str, text: str) -> None:
    """Write the file ``name`` into the folder at a URL. Raises InputError, which names ``key``."""
    from core.files.remote.writing import write_text

    write_text(url, key, name, text)


def remote_run(path: str, store: Any) -> Any:
    """Return the copy at a URL of the run folder of ``store``; None for a path."""
    if not is_url(path):
        return None
    from core.files.remote.written_through import RemoteRun

    return RemoteRun(path, store)
