"""Copies of what lies behind URLs: made once a node, by whichever process needs them first.

A copy belongs to one URL and one state of what is there (names, sizes, the marks that its file system gives), so what
changes there is copied anew and readers of the old copy keep it. It is written under another name, every file is
hashed, and only then sealed. A copy without a seal was interrupted; one whose files have other sizes, or other times
and other hashes, was damaged: both are made again. ``RLREPRO_CACHE`` names the folder (default
``~/.cache/rlrepro``); nothing in it is ever deleted but damaged copies, and all of it may be.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from core.config.locations import name_of
from core.errors import InputError
from core.files.file_names import inside, plain_name
from core.files.remote.urls import Remote, explained, place

VARIABLE = "RLREPRO_CACHE"
MARKS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "created")
BLOCK = 1 << 24  # bytes
COPIERS = 8  # files at a time: one stream of an object store is slower than a network card

log = logging.getLogger(__name__)


def local_copy(url: str, key: str, without: tuple[str, ...] = ()) -> str:
    """Return the path of a URL's copy on this node, made first if need be (:func:`core.config.locations.local_path`).

    Raises:
        InputError: as :func:`core.files.remote.urls.place` and ``explained`` do, or the disk has no room.
    """
    return _copied(url.rstrip("/"), key, without)


@functools.cache
def _copied(url: str, key: str, without: tuple[str, ...]) -> str:
    source = place(url, key)
    with explained(url, key):
        files = listing(source, without)
    if not files:
        raise InputError(f"{key}={url}: the folder is empty; give another URL, or put the files there first")
    marked = json.dumps([url, {name: [info.get("size"), _mark(info)] for name, info in files.items()}], sort_keys=True)
    root = Path(os.environ.get(VARIABLE) or "~/.cache/rlrepro").expanduser().absolute()
    entry = root / hashlib.sha256(marked.encode()).hexdigest()[:20]
    target = entry / name_of(url)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_suffix(".lock"), url):
            if not _is_complete(entry):
                _copy(url, key, source, files, entry)
    except OSError as error:
        raise InputError(
            f"{VARIABLE}={root}: {url} cannot be copied there ({error}); set it to another folder"
        ) from error
    return str(target)


def listing(source: Remote, without: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return file -> what its file system tells of it; the name of a single file is empty.

    Raises what the driver does; InputError for a name that leads out of the folder.
    """
    fs, path = source
    fs.invalidate_cache()
    if (info := fs.info(path))["type"] == "file":
        return {"": info}
    listed = {}
    for full, info in sorted(fs.find(path, detail=True).items()):
        if full.endswith("/") or full == path:  # markers of folders in object stores
            continue
        name = full.removeprefix(f"{path}/") if full.startswith(f"{path}/") else f"../{full}"
        if not any(fnmatch(name, each) for each in without):
            listed[plain_name(name, path)] = info
    return listed


def _mark(info: Mapping[str, Any]) -> str:
    """Return what changes with a file's content, as far as its file system has such a thing."""
    return next((str(info[name]) for name in MARKS if info.get(name) is not None), "")


@contextmanager
def _locked(path: Path, url: str) -> Iterator[None]:
    """Hold the lock of a copy: the processes of a node that need it wait for the one that makes it."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process, which copies %s", url)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_complete(entry: Path) -> bool:
    """Return whether a copy is sealed and its files are what was sealed; a file is read where its time is another."""
    try:
        sealed = json.loads(entry.with_suffix(".json").read_text(encoding="utf-8"))["files"]
        for name, (size, changed, digest) in sealed.items():
            stat = inside(entry, name, entry.with_suffix(".json")).stat()
            if stat.st_size != size or (stat.st_mtime_ns != changed and _sha256(entry / name) != digest):
                log.warning("%s was damaged after it was copied: copied again", entry / name)
                return False
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        log.warning("%s is damaged: copied again", entry.with_suffix(".json"))
        return False
    return True


def _copy(url: str, key: str, source: Remote, files: Mapping[str, Mapping[str, Any]], entry: Path) -> None:
    """Copy all files, under another name until they are complete, and seal them."""
    from tqdm import tqdm

    seal, partial = entry.with_suffix(".json"), entry.with_suffix(".partial")
    seal.unlink(missing_ok=True)
    for leftover in (partial, entry):
        shutil.rmtree(leftover, ignore_errors=True)
    size, free = sum(info.get("size") or 0 for info in files.values()), shutil.disk_usage(entry.parent).free
    if size > free:
        need = f"{size / 2**30:.1f} GiB are copied there, and {free / 2**30:.1f} GiB are free"
        raise InputError(f"{key}={url}: {need} in {entry.parent}; set {VARIABLE} to a folder with room")
    log.info("copying %s (%s files, %.3f GiB) to %s", url, len(files), size / 2**30, entry)
    with tqdm(
        total=size, unit="B", unit_scale=True, desc=name_of(url), disable=not sys.stderr.isatty(), dynamic_ncols=True
    ) as bar:

        def copy(name: str) -> tuple[str, list[Any]]:
            relative = "/".join(filter(None, (name_of(url), name)))
            into = inside(partial, relative, url)
            into.parent.mkdir(parents=True, exist_ok=True)
            with explained(url, key):
                digest = _fetch(source.fs, "/".join(filter(None, (source.path, name))), into, bar)
            stat, size = into.stat(), files[name].get("size")
            if size is not None and stat.st_size != size:
                raise InputError(
                    f"{key}={url}: {relative} has {size} bytes there, and {stat.st_size} arrived; try again"
                )
            return relative, [stat.st_size, stat.st_mtime_ns, digest]

        with ThreadPoolExecutor(min(COPIERS, len(files))) as pool:
            copied = dict(pool.map(copy, files))
    os.rename(partial, entry)
    written = seal.with_suffix(".sealing")
    written.write_text(json.dumps({"url": url, "files": copied}), encoding="utf-8")
    os.replace(written, seal)


def _fetch(fs: Any, path: str, into: Path, bar: Any) -> str:
    """Copy one file, put it on disk and return its SHA-256."""
    digest = hashlib.sha256()
    with fs.open(path, "rb") as file, open(into, "wb") as copy:
        while block := file.read(BLOCK):
            digest.update(block)
            copy.write(block)
            bar.update(len(block))
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
