"""Files: written whole or not at all, and copied from and to URLs.

A URL is reached by a driver of fsspec, which takes logins and addresses from the environment. A
file that is read is copied once per node, to ``RLREPRO_CACHE`` (default ``~/.cache/rlrepro``), from
which nothing is ever deleted.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from core.errors import InputError, WriteFailed

PARTIAL = ".partial"  # end of the name of a file or folder that is being written
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
CACHE = "RLREPRO_CACHE"  # variable that names the folder of copies
# On these file systems a folder has to be made. On others that would make a bucket, which a
# misspelt URL must not.
WITH_FOLDERS = {"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}


def fsync(path: Path) -> None:
    """Force a file, or the list of names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file there replaces ``path`` at the end of the block.

    A reader, also after a kill, finds the old content or the new one. If the block raises, nothing
    new is left.
    """
    # Two processes may write the same file
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
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


def inside(folder: Path, name: str, listed: str | os.PathLike[str]) -> Path:
    """Return the path of a file in ``folder`` by a name from a list that is not trusted.

    Raises InputError for a name that leads elsewhere, also by a link.
    """
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{listed}: the file name {name[:200]!a} leads out of its folder; do not use it"
        )
    return folder / name


def is_url(text: str | Path) -> bool:
    """Return whether a text is a URL, and neither a path nor a hub id."""
    return URL.match(str(text)) is not None


def written_here(text: str) -> Path:
    """Return the path of a command's output, as argparse's ``type``.

    Raises ArgumentTypeError for a URL.
    """
    if is_url(text):
        raise ArgumentTypeError(
            f"{text}: this is written to this machine alone; give a path, and copy it afterwards"
        )
    return Path(text)


@contextmanager
def explained(url: str, key: str, *, writing: bool = False) -> Iterator[None]:
    """Raise the errors of a driver as InputError, or WriteFailed, of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each driver has errors of its own
        failure = WriteFailed if writing else InputError
        text = " ".join(str(error).split())
        raise failure(
            f"{key}={url}: cannot be {'written' if writing else 'read'} ({type(error).__name__}: "
            f"{text}); check the URL, the network and the rights of the login in the environment"
        ) from error


def place(url: str, key: str, *, look: bool = False) -> tuple[Any, str]:
    """Return the file system of a URL that ``key`` names, and the path in it.

    Raises InputError if there is no driver or, with ``look``, nothing at the path.
    """
    import fsspec

    with explained(url, key):
        fs, path = fsspec.core.url_to_fs(url)
        if look:
            fs.invalidate_cache()
            fs.info(path)
    return fs, path.rstrip("/")


def local_path(path: str | Path, key: str = "URL", *, without: Sequence[str] = ()) -> str:
    """Return a path as it is, or the path of a URL's copy on this node.

    A process gets the same copy each time. Files of a folder whose names match ``without`` are not
    copied. Raises InputError, which names ``key``.
    """
    if not is_url(path):
        return str(path)
    return _copied(str(path).rstrip("/"), key, tuple(without))


@functools.cache
def _copied(url: str, key: str, without: tuple[str, ...]) -> str:
    """Return the path of a URL's copy. Each state of the remote files has a copy of its own."""
    fs, path = place(url, key, look=True)
    base = url.rpartition("/")[2]
    with explained(url, key):
        info = fs.info(path)
        files = {path: info} if info["type"] == "file" else fs.find(path, detail=True)
        files = {
            name: details
            for name, details in files.items()
            if not any(fnmatch(name, f"*/{pattern}") for pattern in without)
        }
        state = json.dumps([url, files], sort_keys=True, default=str)
        root = Path(os.environ.get(CACHE) or "~/.cache/rlrepro").expanduser().absolute()
        entry = root / hashlib.sha256(state.encode()).hexdigest()[:20]
        root.mkdir(parents=True, exist_ok=True)
        with open(entry.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a node wait for the one that copies
            if not entry.exists():
                partial = entry.with_suffix(PARTIAL)
                shutil.rmtree(partial, ignore_errors=True)
                for name in files:
                    target = inside(partial, base + name.removeprefix(path), url)
                    download(fs, name, target, key, url)
                os.rename(partial, entry)
    return str(entry / base)


def download(fs: Any, source: str, target: Path, key: str, url: str) -> None:
    """Copy one file from a file system to this machine. Raises InputError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with explained(url, key):
        fs.get_file(source, str(target))
    fsync(target)


def upload(url: str, key: str, name: str, content: bytes | Path) -> None:
    """Write bytes, or a file of this machine, as ``name`` into the folder at a URL.

    Raises WriteFailed.
    """
    fs, path = place(url, key)
    target = f"{path}/{name}"
    with explained(url, key, writing=True):
        if url.partition("://")[0] in WITH_FOLDERS:
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        if isinstance(content, Path):
            fs.put_file(str(content), target)
        else:
            fs.pipe_file(target, content)


def check_writable(url: str | Path, key: str) -> None:
    """Write a small file into the folder at a URL and delete it; a path is not tried.

    Raises WriteFailed.
    """
    if is_url(url):
        upload(str(url), key, ".writable", b"may be deleted")
        fs, path = place(str(url), key)
        with explained(str(url), key, writing=True):
            fs.rm_file(f"{path}/.writable")


@contextmanager
def full_disk_as_oserror(path: Path) -> Iterator[None]:
    """Raise errors of the disk as OSError, which safetensors hides in an error of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # 28 for a full disk
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(path)) from error
