"""The passages: a file of JSON lines ``{"id", "contents"}``, read by row number from where it lies
on disk.

``scan`` goes over a corpus once, checks every line, and leaves in the index folder where each line
begins (``offsets.npy``) and the file's SHA-256 (``corpus.json``). A gzip file cannot be read by
row: it is unpacked into the index folder (``passages.jsonl``) on the way. The hash is that of the
unpacked bytes, so both forms are one corpus.
"""

from __future__ import annotations

import array
import gzip
import hashlib
import json
import mmap
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from core.files import write_atomic
from recipes.search_r1.index.passages import Passage, RetrievalError

ABOUT = "corpus.json"
OFFSETS = "offsets.npy"
UNPACKED = "passages.jsonl"
SEEN = "corpus_seen.json"
# Called with the number of rows (or bytes) done since the last call
Progress = Callable[[int], None]


def no_progress(_: int) -> None:
    """Ignore the progress: the default of functions that report it."""


def scan(source: Path, folder: Path, progress: Progress = no_progress) -> dict[str, Any]:
    """Check the corpus, write the files of ``Corpus`` into ``folder``, and return the content of
    ``corpus.json``.

    Raises RetrievalError with the line's number where a line is not a passage.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packed = source.suffix == ".gz"
    digest = hashlib.sha256()
    offsets = array.array("Q", [0])
    part = folder / f"{UNPACKED}.part"
    with _opened(source) as lines, open(part if packed else os.devnull, "wb") as copy:
        for number, line in enumerate(lines, 1):
            _check(line, source, number)
            digest.update(line)
            copy.write(line)
            offsets.append(offsets[-1] + len(line))
            progress(1)
    if len(offsets) == 1:
        raise RetrievalError(
            f"{source}: the corpus has no line; give a file of {{id, contents}} lines"
        )
    if packed:
        os.replace(part, folder / UNPACKED)
    with open(folder / f"{OFFSETS}.part", "wb") as file:
        np.save(file, np.frombuffer(offsets, np.uint64))
    os.replace(folder / f"{OFFSETS}.part", folder / OFFSETS)
    path = None if packed else str(source.resolve())
    about = {
        "path": path,
        "rows": len(offsets) - 1,
        "bytes": offsets[-1],
        "sha256": digest.hexdigest(),
    }
    write_json(folder / ABOUT, about)
    return about


class Corpus:
    """The passages of a scanned corpus. ``hash`` is the SHA-256 of its (unpacked) file.

    ``path`` is the file; without it, the one that was scanned. Raises RetrievalError where file and
    scan do not belong together: the size is compared always, the hash once for every (path, size,
    modification time).
    """

    def __init__(self, folder: Path, path: Path | None = None):
        about = read_json(folder / ABOUT)
        self.hash: str = about["sha256"]
        self.path = _file_of(about, folder, path)
        _same(self.path, about, folder)
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        if len(self._offsets) - 1 != about["rows"]:
            raise RetrievalError(
                f"{folder / OFFSETS}: {len(self._offsets) - 1} rows, {ABOUT} has {about['rows']}"
            )
        with open(self.path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def row(self, number: int) -> dict[str, Any]:
        start = int(self._offsets[number])
        end = int(self._offsets[number + 1])
        return json.loads(self._bytes[start:end])

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> list[Passage]:
        found = [self.row(int(number)) for number in rows]
        return [
            Passage(str(row["id"]), row["contents"], float(score))
            for row, score in zip(found, scores, strict=True)
        ]

    def contents(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """Yield the texts of rows ``start`` to ``stop``, in order."""
        for number in range(start, len(self) if stop is None else stop):
            yield self.row(number)["contents"]


def _opened(path: Path) -> IO[bytes]:
    """Open the corpus for its lines. The published ``wiki-18.jsonl.gz`` is in fact a tar archive
    with one file."""
    try:
        if path.suffix != ".gz":
            return open(path, "rb")
        with gzip.open(path, "rb") as file:
            packed_twice = file.read(512)[257:262] == b"ustar"
        return _only_member(path) if packed_twice else gzip.open(path, "rb")
    except OSError as error:
        raise RetrievalError(
            f"{path}: the corpus cannot be read ({error}); give the jsonl file"
        ) from error


def _only_member(path: Path) -> IO[bytes]:
    archive = tarfile.open(path, "r|gz")  # noqa: SIM115 (what is returned reads from it)
    for member in archive:
        lines = archive.extractfile(member) if member.isfile() else None
        if lines is not None:
            return lines
    raise RetrievalError(f"{path}: an archive without a file; give the jsonl file")


def _check(line: bytes, path: Path, number: int) -> None:
    try:
        row = json.loads(line)
        good = isinstance(row["contents"], str) and isinstance(row["id"], str | int)
    except (ValueError, KeyError, TypeError) as error:
        raise RetrievalError(
            f"{path} line {number}: not {{id, contents}} ({error!r}); mend or remove it"
        ) from error
    if not good:
        raise RetrievalError(
            f"{path} line {number}: id must be text or a number, contents text; mend or remove it"
        )


def _file_of(about: dict[str, Any], folder: Path, given: Path | None) -> Path:
    if given is None:
        path = Path(about["path"]) if about["path"] else folder / UNPACKED
    else:  # a packed file was unpacked into the folder; that it is this one is told by its hash
        path = (
            folder / UNPACKED if given.suffix == ".gz" and (folder / UNPACKED).exists() else given
        )
        if path != given and _sha256(given) != about["sha256"]:
            raise RetrievalError(
                f"{given}: not the corpus that {folder} was built from; build its index again"
            )
    if not path.is_file():
        raise RetrievalError(
            f"{path}: the corpus of {folder} is not there; name it with corpus= (--corpus)"
        )
    return path


def _same(path: Path, about: dict[str, Any], folder: Path) -> None:
    """Check that the file is the one that was scanned. A file found equal is not read again until
    it changes."""
    other = f"not the corpus that {folder} was built from"
    status = path.stat()
    if status.st_size != about["bytes"]:
        raise RetrievalError(
            f"{path}: {status.st_size} bytes, {about['bytes']} were indexed: "
            f"{other}; build it again"
        )
    seen = {
        "path": str(path.resolve()),
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": about["sha256"],
    }
    if (folder / SEEN).exists() and read_json(folder / SEEN) == seen:
        return
    if _sha256(path) != about["sha256"]:
        raise RetrievalError(
            f"{path}: the same size but other text: {other}; build its index again"
        )
    if os.access(folder, os.W_OK):
        write_json(folder / SEEN, seen)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with _opened(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file. Raises RetrievalError where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RetrievalError(f"{path}: not readable ({error}); build the index again") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, all or nothing."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")
