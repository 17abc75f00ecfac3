"""Names of files as a manifest or an index lists them: the one place where such a name becomes a path.

A manifest may come from somebody else, and its hash has no key, so that its names may be anything. What is read or
written by them has to lie in the folder that the manifest is about.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from core.errors import InputError

RULE = "leads out of its folder, or is no name of a file"
FIX = "take what this belongs to from where it was made; somebody has altered it"


def plain_name(name: Any, listed: str | os.PathLike[str]) -> str:
    """Return the name, relative with ``/`` between its parts. ``listed`` is where it is listed, for the message.

    Raises InputError for what is no text, is absolute, or has a part that is empty, ``.`` or ``..``, a backslash, a
    drive's letter, a control character, or half a surrogate pair.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    drive = parts[0][1:2] == ":"
    if drive or any(part in ("", ".", "..") or "\\" in part or not part.isprintable() for part in parts):
        raise InputError(f"{listed}: the file name {ascii(name)[:200]} {RULE}; {FIX}")
    return name


def inside(folder: Path, name: Any, listed: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this name in ``folder``, where it need not exist yet.

    Raises InputError as :func:`plain_name`, and where a part of it is a link, or what is there is neither a file nor a
    folder: reading a pipe would never end.
    """
    path = folder
    for part in plain_name(name, listed).split("/"):
        path /= part
        try:
            mode = path.lstat().st_mode
        except OSError:  # it does not exist, which its reader reports
            return folder / name
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InputError(f"{listed}: {path} is a link, or no ordinary file; put the file itself there")
    return path
