"""Files that a person reads afterwards: JSON lines, on disk before the next step, and what a write that fails costs.

A record that cannot be written costs a warning and itself, never the training. Checkpoints are not among them, see
:mod:`core.checkpoint.store`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from core.errors import WriteFailed, unwritten
from core.files import write_atomic

log = logging.getLogger(__name__)
Row = Mapping[str, Any]


# --- JSON lines ---


def json_line(row: Row) -> str:
    """Return a row as a line. Half a surrogate pair, which no file can hold, is written as an escape."""
    line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(row, default=str) + "\n"
    return line


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add the rows to the file, on disk when this returns. Raises OSError, and leaves no part of a line then."""
    data = memoryview("".join(map(json_line, rows)).encode())
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def intact_rows(path: Path, *, of_steps: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a file, and for each damaged line its number and what is wrong. No file has neither.

    An incomplete last line, of a process killed in writing it, is neither. ``of_steps``: a row without the number of a
    step is damaged.
    """
    # Not splitlines: it also splits at U+2028 and the like, which JSON leaves as they are inside an answer.
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode()) if line else None
            if of_steps and line and (type(row) is not dict or type(row.get("step")) is not int):
                raise ValueError("no mapping with the number of a step")
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                damaged.append(f"line {number}: {type(error).__name__}: {error}")
            continue
        if line:
            rows.append(row)
    return rows, damaged


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; an incomplete last line is left out. Raises ValueError where another is damaged."""
    rows, damaged = intact_rows(path)
    if damaged:
        raise ValueError(f"{path}, {damaged[0]}")
    return rows


def mend(path: Path) -> None:
    """Rewrite a file of steps without its damaged lines, and keep the file as it was beside it, with a warning."""
    rows, damaged = intact_rows(path, of_steps=True)
    if damaged:
        aside = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, aside)
        write_atomic(path, "".join(map(json_line, rows)))
        text = "%s: %d damaged lines (%s) are left out, and the run resumes without them; %s has the file as it was"
        log.warning(text, path, len(damaged), damaged[0], aside.name)


# --- writes that may fail ---


class Records:
    """Counts by name what was dropped. The first failure of a name in a row is a warning, and so is its end."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._failing: Counter[str] = Counter()

    def attempt(self, name: str, path: Path | str, write: Callable[[], Any], lost: str = "is dropped") -> bool:
        """Call ``write`` and return whether it worked. ``lost`` is what becomes of ``name`` where it did not."""
        try:
            write()
        except (OSError, WriteFailed) as error:
            reason = error if isinstance(error, WriteFailed) else unwritten(error, path, name)
            if not self._failing[name]:
                log.warning("%s: it %s, and the run goes on; make room there", reason, lost)
            self._failing[name] += 1
            self.dropped[name] += 1
            return False
        if failures := self._failing.pop(name, 0):
            log.warning("%s: %s can be written again, after %d that failed", path, name, failures)
        return True


def step_of(path: Path) -> int:
    """Return the step of a record named ``step_N``, complete or not; -1 for another name."""
    number = path.name.split(".")[0].removeprefix("step_")
    return int(number) if number.isdecimal() else -1
