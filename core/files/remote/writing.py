"""Writing to places behind URLs: a check before a run begins, and a second and a third try while it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from core.errors import InputError
from core.files.remote.urls import brief, explained, makes_folders, place

PAUSES_S = (2.0, 20.0)  # before the second and the third try: a server that restarts is back by then

log = logging.getLogger(__name__)


def check_writable(url: str, key: str) -> None:
    """Write a small file into the folder at a URL and delete it.

    Raises:
        InputError: no driver, no rights, out of reach; names ``key``.
    """
    fs, path = place(url, key)
    with explained(url, key, "write"):
        make_parent(url, key, f"{path}/.writable")
        fs.pipe_file(f"{path}/.writable", b"may be deleted")
        fs.rm_file(f"{path}/.writable")


def write_text(url: str, key: str, name: str, text: str) -> None:
    """Write the file ``name`` into the folder at a URL, in place of an earlier one.

    Raises:
        InputError: it cannot be written in three tries.
    """
    fs, path = place(url, key)

    def write() -> None:
        make_parent(url, key, f"{path}/{name}")
        fs.pipe_file(f"{path}/{name}", text.encode())

    with explained(url, key, "write"):
        tried(write, url)


def put_file(url: str, key: str, file: Path, target: str) -> None:
    """Copy a file to the path ``target`` of the file system of a URL. Raises what the driver does."""
    make_parent(url, key, target)
    place(url, key).fs.put_file(str(file), target)


def make_parent(url: str, key: str, target: str) -> None:
    """Make the folder of the path ``target``, where the file system has folders."""
    if makes_folders(url):
        place(url, key).fs.makedirs(target.rpartition("/")[0], exist_ok=True)


def tried(write: Callable[[], None], url: str) -> None:
    """Call ``write`` up to three times. Raises what the last call does; a lack of rights at once."""
    for pause in PAUSES_S:
        try:
            return write()
        except (InputError, PermissionError):
            raise
        except Exception as error:  # each driver has errors of its own
            log.warning("%s could not be written (%s): tried again in %g s", url, brief(error), pause)
            time.sleep(pause)
    return write()
