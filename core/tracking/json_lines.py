"""Files with a JSON object a line: appended whole, and read without half-written lines."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line.

    Half a surrogate pair, which no file can hold, is written as an escape of JSON.
    """
    text = json.dumps(row, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode() + "\n"


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add the rows to the file; they are on disk when this returns.

    Raises OSError, and leaves no part of a line then.
    """
    unwritten = memoryview("".join(map(json_line, rows)).encode())
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while unwritten:
                written = file.write(unwritten)
                unwritten = unwritten[written:]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def intact_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a file, and for each damaged line its number and what is wrong.

    An incomplete last line, of a process that was killed in writing it, is neither. A file that
    does not exist has no rows.
    """
    if not path.exists():
        return [], []
    rows = []
    damaged = []
    # Not splitlines: it also splits at U+2028 and the like, which JSON leaves as they are in texts
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line.decode())
            if not isinstance(row, dict):
                raise ValueError("no mapping")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                damaged.append(f"line {number}: {type(error).__name__}: {error}")
    return rows, damaged


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without an incomplete last line.

    Raises ValueError if another line is damaged.
    """
    rows, damaged = intact_rows(path)
    if damaged:
        raise ValueError(f"{path}, {damaged[0]}")
    return rows
