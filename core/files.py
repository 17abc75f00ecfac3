"""Files: written whole or not at all, checked for what a download left out, and copied from and to URLs.

A URL (``s3://bucket/train.parquet``) is reached by a driver of fsspec, which takes logins and addresses from the
environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``). What is read is copied once a node, to ``RLREPRO_CACHE``
(default ``~/.cache/rlrepro``), from which nothing is ever deleted. fsspec is imported for a URL alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
import zipfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from core.errors import InputError, WriteFailed

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- written whole or not at all

PARTIAL = ".partial"  # end of the name of a file or folder that is being written


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


# ---------------------------------------------------------------- names that somebody else listed


def plain_name(name: Any, listed: str | os.PathLike[str]) -> str:
    """Return the name of a file, relative with ``/`` between its parts. ``listed`` is where it is listed.

    Raises InputError for what is no text, is absolute or leads upwards: a manifest may come from somebody else.
    """
    path = PurePosixPath(name) if isinstance(name, str) and "\0" not in name and "\\" not in name else None
    if path is None or path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
        rule = "leads out of its folder, or is no name of a file"
        fix = "take what this belongs to from where it was made; somebody has altered it"
        raise InputError(f"{listed}: the file name {ascii(name)[:200]} {rule}; {fix}")
    return name


def inside(folder: Path, name: Any, listed: str | os.PathLike[str]) -> Path:
    """Return the path of a file of this name in ``folder``, where it need not exist yet.

    Raises InputError as :func:`plain_name`, and where a link leads out of the folder.
    """
    path = folder / plain_name(name, listed)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{listed}: {path} is a link out of its folder; put the file itself there")
    return path


# ---------------------------------------------------------------- what a download left incomplete

LARGEST_HEADER = 100_000_000  # bytes, as safetensors itself bounds it
POINTER = b"version https://git-lfs.github.com/spec/"
# Of a model's folder, beside its weights and its tokenizer; other files are not read.
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
CONFIGS += ("added_tokens.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json")
# What is loaded is the first of each group that is there.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHTS = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
DOWNLOAD_AGAIN = "download it again, and compare its size with that at its source"


def damage(path: Path, *, weights: bool = True) -> str | None:
    """Return what is wrong with a file, or with the first such file of a model's folder; None where all are whole.

    A file's own header, footer or syntax tells how long it has to be; no tensor is read.
    """
    for file in _of_model(path, weights) if path.is_dir() else [path]:
        if file.is_file():
            stat = file.stat()
            what = _damage(file, stat.st_size, stat.st_mtime_ns)
            if what := what or (_parts(file) if file.name.endswith(".index.json") else None):
                return f"{file.name} {what}"
    return None


def _of_model(folder: Path, weights: bool) -> Iterator[Path]:
    """Yield the files of a model's folder that are loaded."""
    yield from (folder / name for name in CONFIGS)
    for group in (TOKENIZERS, ADAPTERS, WEIGHTS) if weights else (TOKENIZERS,):
        for file in [folder / name for name in group if (folder / name).is_file()][:1]:
            yield file
            if group is WEIGHTS and file.suffix == ".json":  # model-00001-of-00002.safetensors
                yield from sorted(folder.glob(f"{file.name.partition('.')[0]}-*-of-*"))


@functools.cache
def _damage(file: Path, size: int, changed: int) -> str | None:
    """Return what is wrong with one file; ``changed`` is a key of the cache."""
    with open(file, "rb") as stream:
        start = stream.read(512)
    if start.startswith(POINTER):
        stated = start.partition(b"\nsize ")[2].split(b"\n")[0].decode(errors="replace")
        return f"is a Git LFS pointer of {size:,} bytes to a file of {stated}, which was not fetched (git lfs pull)"
    if size == 0:
        return "is empty (0 bytes)"
    if file.suffix == ".safetensors":
        return _safetensors(file, size)
    if file.suffix == ".json":
        return _json(file, size)
    if file.suffix == ".bin" and start.startswith(b"PK") and not zipfile.is_zipfile(file):
        return f"is cut short: it has {size:,} bytes, and lacks the directory at its end"
    return None


def _safetensors(file: Path, size: int) -> str | None:
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, size))
    if size < 8 + length <= LARGEST_HEADER:
        return f"is cut short: it has {size:,} bytes, and its header alone takes {8 + length:,}"
    try:
        tensors = [one for name, one in json.loads(header).items() if name != "__metadata__"]
        needed = 8 + length + max((one["data_offsets"][1] for one in tensors), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return f"is no safetensors file ({size:,} bytes; its header cannot be read)"
    if size == needed:
        return None
    return f"is {'cut short' if size < needed else 'too long'}: it has {size:,} bytes, and its header names {needed:,}"


def _json(file: Path, size: int) -> str | None:
    try:
        json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is cut short or no JSON: it has {size:,} bytes ({error})"
    return None


def _parts(index: Path) -> str | None:
    """Return which file of a model in parts is missing. Raises InputError for a name that leads elsewhere."""
    content = json.loads(index.read_bytes())
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        return "names no files (weight_map)"
    files = {plain_name(name, index) for name in names.values()}
    absent = sorted(name for name in files if not (index.parent / name).is_file())
    shown = ", ".join(absent[:3])
    return f"names {len(files)} files, of which {len(absent)} are not there ({shown})" if absent else None


# ---------------------------------------------------------------- URLs

URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
CACHE = "RLREPRO_CACHE"  # variable that names the folder of copies
# What changes with a file's content, as far as its file system has such a thing
MARKS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "created")
COPIERS = 8  # files at a time: one stream of an object store is slower than a network card
PAUSES_S = (2.0, 20.0)  # before the second and the third try to write: a server that restarts is back by then
# File systems with folders. Elsewhere to make one would make a bucket, which a misspelt URL must not.
WITH_FOLDERS = {"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs"}


def is_url(text: str | Path) -> bool:
    """Return whether a text is a URL, and neither a path nor a hub id."""
    return URL.match(str(text)) is not None


def name_of(url: str) -> str:
    """Return the last part of a URL: the name of the file or folder."""
    return url.rstrip("/").rpartition("/")[2]


def written_here(text: str) -> Path:
    """Return the path of a command's output, as argparse's ``type``. Raises ArgumentTypeError for a URL."""
    if is_url(text):
        raise ArgumentTypeError(f"{text}: this is written to this machine alone; give a path, and copy it afterwards")
    return Path(text)


class RemotePlace(NamedTuple):
    """A URL as its driver has it: the file system, and the path in it."""

    fs: Any
    path: str


def driver_problem(url: str) -> tuple[str, str] | None:
    """Return what is wrong with the driver of a URL and what to do; None where it is there. Opens no connection."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        return f"the driver of {protocol}:// is not installed", str(error)
    except ValueError:
        return f"no driver for {protocol}:// is known", "use file://, s3://, gs://, hdfs:// or another of fsspec's"
    return None


def url_problem(url: str, key: str, *, look: bool) -> tuple[str, str] | None:
    """Return which rule a URL breaks and what to do; None where none. With ``look`` the place itself is looked up."""
    if (problem := driver_problem(url)) or not look:
        return problem
    try:
        fs, path = place(url, key)
        with explained(url, key):
            fs.invalidate_cache()
            fs.info(path)
    except InputError as error:
        rule, _, fix = str(error).removeprefix(f"{key}={url}: ").rpartition("; ")
        return rule, fix
    return None


def place(url: str, key: str) -> RemotePlace:
    """Return the file system and the path of a URL that ``key`` names. Raises InputError where there is no driver."""
    import fsspec

    if problem := driver_problem(url):
        raise InputError(f"{key}={url}: {'; '.join(problem)}")
    with explained(url, key):
        fs, path = fsspec.core.url_to_fs(url)
    return RemotePlace(fs, path.rstrip("/"))


@contextmanager
def explained(url: str, key: str, what: str = "read") -> Iterator[None]:
    """Turn what a driver raises into one line. Each driver has errors of its own, so all of them are caught.

    Raises:
        InputError: the place does not exist, gives no rights, or cannot be reached; WriteFailed where it was to be
            written, for another try may succeed.
    """
    failed, done = (WriteFailed, "written") if what == "write" else (InputError, "read")
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        raise failed(f"{key}={url}: does not exist; give another URL, or put it there first") from error
    except PermissionError as error:
        fix = "give its login rights to, in the environment that the driver reads, or another URL"
        raise failed(f"{key}={url}: no rights to {what} there ({_brief(error)}); {fix}") from error
    except Exception as error:
        fix = "check the URL, the network and the login in the environment"
        raise failed(f"{key}={url}: cannot be {done} ({_brief(error)}); {fix}") from error


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def listing(source: RemotePlace, without: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
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


def local_path(path: str | Path, key: str = "URL", *, without: Sequence[str] = ()) -> str:
    """Return a path as it is, and for a URL that of its copy on this node, made first if need be.

    Every call in a process returns the same copy, whatever changes at the URL meanwhile. Of a folder, files whose names
    match ``without`` are left out. Raises InputError, which names ``key``.
    """
    return _copied(str(path).rstrip("/"), key, tuple(without)) if is_url(path) else str(path)


@functools.cache
def _copied(url: str, key: str, without: tuple[str, ...]) -> str:
    """Return the path of a URL's copy. A copy belongs to one state of what is there: a change is another copy."""
    source = place(url, key)
    with explained(url, key):
        files = listing(source, without)
    if not files:
        raise InputError(f"{key}={url}: the folder is empty; give another URL, or put the files there first")
    state = {
        name: [info.get("size"), next((str(info[mark]) for mark in MARKS if info.get(mark) is not None), "")]
        for name, info in files.items()
    }
    root = Path(os.environ.get(CACHE) or "~/.cache/rlrepro").expanduser().absolute()
    entry = root / hashlib.sha256(json.dumps([url, state], sort_keys=True).encode()).hexdigest()[:20]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(entry.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a node wait for the one that copies
            if not entry.exists():
                _copy(url, key, source, {name: info.get("size") for name, info in files.items()}, entry)
    except OSError as error:
        raise InputError(f"{CACHE}={root}: {url} cannot be copied there ({error}); set it to another folder") from error
    return str(entry / name_of(url))


def _copy(url: str, key: str, source: RemotePlace, sizes: dict[str, int | None], entry: Path) -> None:
    """Copy all files to a folder of another name, which is renamed once they are complete."""
    partial = entry.with_suffix(PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    size, free = sum(one or 0 for one in sizes.values()), shutil.disk_usage(entry.parent).free
    if size > free:
        need = f"{size / 2**30:.1f} GiB are copied there, and {free / 2**30:.1f} GiB are free"
        raise InputError(f"{key}={url}: {need} in {entry.parent}; set {CACHE} to a folder with room")
    log.info("copying %s (%s files, %.3f GiB) to %s", url, len(sizes), size / 2**30, entry)

    def copy(name: str) -> None:
        into = partial / "/".join(filter(None, (name_of(url), name)))
        into.parent.mkdir(parents=True, exist_ok=True)
        with explained(url, key):
            source.fs.get_file("/".join(filter(None, (source.path, name))), str(into))
        arrived = into.stat().st_size
        if sizes[name] not in (None, arrived):
            raise InputError(f"{key}={url}: {name} has {sizes[name]} bytes there, and {arrived} arrived; try again")
        fsync(into)

    with ThreadPoolExecutor(min(COPIERS, len(sizes))) as pool:
        list(pool.map(copy, sizes))
    os.rename(partial, entry)


def check_writable(url: str | Path, key: str) -> None:
    """Write a small file into the folder at a URL and delete it; of a path nothing. Raises InputError."""
    if not is_url(url):
        return
    fs, path = place(str(url), key)
    with explained(str(url), key, "write"):
        make_parent(str(url), fs, f"{path}/.writable")
        fs.pipe_file(f"{path}/.writable", b"may be deleted")
        fs.rm_file(f"{path}/.writable")


def write_remote_text(url: str, key: str, name: str, text: str) -> None:
    """Write the file ``name`` into the folder at a URL. Raises WriteFailed after three tries."""
    fs, path = place(url, key)

    def write() -> None:
        make_parent(url, fs, f"{path}/{name}")
        fs.pipe_file(f"{path}/{name}", text.encode())

    with explained(url, key, "write"):
        tried(write, url)


def make_parent(url: str, fs: Any, target: str) -> None:
    """Make the folder of the path ``target``, where the file system has folders."""
    if url.partition("://")[0] in WITH_FOLDERS:
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)


def tried(write: Callable[[], None], url: str) -> None:
    """Call ``write`` up to three times. Raises what the last call does; a lack of rights at once."""
    for pause in PAUSES_S:
        try:
            return write()
        except (InputError, PermissionError):
            raise
        except Exception as error:  # each driver has errors of its own
            log.warning("%s could not be written (%s): tried again in %g s", url, _brief(error), pause)
            time.sleep(pause)
    return write()
