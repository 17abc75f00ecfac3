"""Files: written whole or not at all, checked for what a download left out, and copied from and to URLs.

A URL is reached by a driver of fsspec, which takes logins and addresses from the environment. What is read is copied
once a node, to ``RLREPRO_CACHE`` (default ``~/.cache/rlrepro``), from which nothing is ever deleted.
"""

from __future__ import annotations

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
from pathlib import Path, PurePosixPath
from typing import Any

from core.errors import InputError, WriteFailed

PARTIAL = ".partial"  # end of the name of a file or folder that is being written
POINTER = b"version https://git-lfs.github.com/spec/"
DOWNLOAD_AGAIN = "download it again, and compare its size with that at its source"
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
CACHE = "RLREPRO_CACHE"  # variable that names the folder of copies
# Of these file systems a folder has to be made. On others that would make a bucket, which a misspelt URL must not.
WITH_FOLDERS = {"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}


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


def inside(folder: Path, name: Any, listed: str | os.PathLike[str]) -> Path:
    """Return the path of a file of this name in ``folder``, from a list that anybody may have written.

    Raises InputError for a name that leads elsewhere, a link included.
    """
    plain = isinstance(name, str) and "\0" not in name and "\\" not in name and str(PurePosixPath(name)) == name != "."
    if plain and ".." not in name.split("/") and (folder / name).resolve().is_relative_to(folder.resolve()):
        return folder / name
    raise InputError(
        f"{listed}: the file name {ascii(name)[:200]} leads out of its folder; it was altered, do not use it"
    )


def damage(path: Path) -> str | None:
    """Return what a download left incomplete of a file, or of a model's folder; None where nothing is found."""
    from safetensors import SafetensorError, safe_open

    for file in [path] if path.is_file() else [*path.glob("*.json"), *path.glob("*.safetensors")]:
        with open(file, "rb") as stream:
            begin = stream.read(len(POINTER))
        size = f"{file.stat().st_size:,} bytes"
        if begin == POINTER:
            return f"{file.name} is a Git LFS pointer of {size} to a file that was not fetched (git lfs pull)"
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "numpy"):  # compares the sizes in the header with that of the file
                    pass
        except (SafetensorError, OSError) as error:
            return f"{file.name} is cut short or altered: it has {size} ({error})"
        if not begin:
            return f"{file.name} is empty ({size})"
    return None


def is_url(text: str | Path) -> bool:
    """Return whether a text is a URL, and neither a path nor a hub id."""
    return URL.match(str(text)) is not None


def written_here(text: str) -> Path:
    """Return the path of a command's output, as argparse's ``type``. Raises ArgumentTypeError for a URL."""
    if is_url(text):
        raise ArgumentTypeError(f"{text}: this is written to this machine alone; give a path, and copy it afterwards")
    return Path(text)


def url_problem(url: str, key: str, *, look: bool) -> tuple[str, str] | None:
    """Return which rule a URL breaks and what to do; None where none. Without ``look`` its driver has to be there."""
    import fsspec

    try:
        with explained(url, key):
            fsspec.get_filesystem_class(url.partition("://")[0])
            if look:
                fs, path = fsspec.core.url_to_fs(url)
                fs.invalidate_cache()
                fs.info(path)
    except InputError as error:
        rule, _, fix = str(error).removeprefix(f"{key}={url}: ").rpartition("; ")
        return rule, fix
    return None


def place(url: str, key: str) -> tuple[Any, str]:
    """Return the file system of a URL that ``key`` names, and the path in it. Raises InputError without a driver."""
    import fsspec

    with explained(url, key):
        fs, path = fsspec.core.url_to_fs(url)
    return fs, path.rstrip("/")


@contextmanager
def explained(url: str, key: str, *, writing: bool = False) -> Iterator[None]:
    """Raise what a driver raises (each has errors of its own) as InputError, or WriteFailed, of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        what = f"cannot be {'written' if writing else 'read'} ({type(error).__name__}: {' '.join(str(error).split())})"
        what = "does not exist" if isinstance(error, FileNotFoundError) else what
        fix = "check the URL, the network and the rights of the login in the environment"
        raise (WriteFailed if writing else InputError)(f"{key}={url}: {what}; {fix}") from error


def local_path(path: str | Path, key: str = "URL", *, without: Sequence[str] = ()) -> str:
    """Return a path as it is, and for a URL that of its copy on this node: for a process always the same one.

    Of a folder, files whose names match ``without`` are left out. Raises InputError, which names ``key``.
    """
    return _copied(str(path).rstrip("/"), key, tuple(without)) if is_url(path) else str(path)


@functools.cache
def _copied(url: str, key: str, without: tuple[str, ...]) -> str:
    """Return the path of a URL's copy. A copy belongs to one state of what is there: a change is another copy."""
    fs, path = place(url, key)
    with explained(url, key):
        fs.invalidate_cache()
        info = fs.info(path)
        there = {path: info} if info["type"] == "file" else fs.find(path, detail=True)
    base = url.rpartition("/")[2]
    names = {full: f"{base}/{full.removeprefix(path).lstrip('/')}".rstrip("/") for full in there if full != f"{path}/"}
    names = {full: name for full, name in names.items() if not any(fnmatch(name, f"*/{each}") for each in without)}
    if not names:
        raise InputError(f"{key}={url}: the folder is empty; give another URL, or put the files there first")
    state = json.dumps([url, {full: there[full] for full in sorted(names)}], default=str)
    root = Path(os.environ.get(CACHE) or "~/.cache/rlrepro").expanduser().absolute()
    entry = root / hashlib.sha256(state.encode()).hexdigest()[:20]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(entry.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a node wait for the one that copies
            if not entry.exists():
                partial = entry.with_suffix(PARTIAL)
                shutil.rmtree(partial, ignore_errors=True)
                for full, name in names.items():
                    download(fs, full, inside(partial, name, url), key, url)
                os.rename(partial, entry)
    except OSError as error:
        raise InputError(f"{CACHE}={root}: {url} cannot be copied there ({error}); set it to another folder") from error
    return str(entry / base)


def download(fs: Any, source: str, target: Path, key: str, url: str) -> None:
    """Copy one file from a file system to this machine. Raises InputError, also where it arrives short."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with explained(url, key):
        fs.get_file(source, str(target))
        size = fs.size(source)
    if size not in (None, target.stat().st_size):
        raise InputError(f"{key}={url}: {target.stat().st_size} of {size} bytes of {source} arrived; try again")
    fsync(target)


def upload(url: str, key: str, name: str, content: bytes | Path) -> None:
    """Write bytes, or a file of this machine, as ``name`` into the folder at a URL. Raises WriteFailed."""
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
    """Write a small file into the folder at a URL and delete it; of a path nothing. Raises WriteFailed."""
    if is_url(url):
        upload(str(url), key, ".writable", b"may be deleted")
        fs, path = place(str(url), key)
        with explained(str(url), key, writing=True):
            fs.rm_file(f"{path}/.writable")
