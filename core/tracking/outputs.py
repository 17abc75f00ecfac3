"""Stdout and stderr that outlive their reader: a closed pipe or terminal, or a full disk, ends no training.

A write that fails moves the stream to ``output.log`` of the run folder, with one line there and, where that still can
be written, on the other stream. The file descriptor itself is moved, so that libraries and processes that are started
later write there too. Not for what a run records: that is in :mod:`core.tracking.records`.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOG = "output.log"  # in the run folder
VARIABLE = "RLREPRO_OUTPUT_LOG"  # its path, for processes that inherit this one's output
PATIENCE_S = 10.0  # for a pipe that does not block to be read
MOST_HELD = 2**20  # bytes of output that are held until the run folder is known
STREAMS = ("stdout", "stderr")


class Output(io.FileIO):
    """A file descriptor for output whose writes never fail. ``broken`` is why it cannot be written, if it cannot."""

    def __init__(self, fd: int, stream: str, outputs: Outputs, broken: str = ""):
        super().__init__(fd, "w", closefd=False)
        self.stream, self.outputs, self.broken = stream, outputs, broken
        self.moved = False
        self.held = bytearray()  # until the log's place is known
        self.lost = 0  # bytes that not even the log took

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if self.lost and not self._put(memoryview(b"[%d bytes of output were lost]\n" % self.lost)):
            self.lost = 0
        left = self._put(data)
        if left and not self.moved and len(self.held) + left <= MOST_HELD:
            self.held += data[len(data) - left :]
        else:
            self.lost += left
        return len(data)

    def _put(self, data: memoryview) -> int:
        """Write the bytes here or, where that fails, to the log. Return how many could be written to neither."""
        while data:
            try:
                data = data[self._some(data) :]
            except OSError as error:
                self.broken = error.strerror or str(error)
                if not self.move():
                    break
        return len(data)

    def _some(self, data: memoryview) -> int:
        """Write some of the bytes and return how many. Raises OSError."""
        if self.broken and not self.moved:
            raise OSError(self.broken)
        if (written := super().write(data)) is None:  # a pipe that does not block, and is full
            select.select([], [self], [], PATIENCE_S)
            written = super().write(data)
        if written is None:
            raise OSError("nothing reads it")
        return written

    def move(self) -> bool:
        """Move a broken descriptor to the log, once, and return whether it was."""
        if self.moved or not self.broken or self.outputs.log is None:
            return False
        try:
            self.outputs.log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self.outputs.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            return False
        os.dup2(log, self.fileno())
        os.close(log)
        self.moved = True
        word = f"warning: {self.stream} cannot be written ({self.broken}): the run goes on, and what it prints is in"
        self.outputs.warn(self, f"{word} {self.outputs.log}\n")
        held, self.held = bytes(self.held), bytearray()
        self.write(held)
        return True


class Outputs:
    """The two streams of a process. ``log`` is where a broken one goes; until it is known they hold what is written."""

    def __init__(self, log: str | os.PathLike[str] | None = None):
        self.log = Path(log).absolute() if log else None
        self.raw: list[Output] = []
        self.before = {name: getattr(sys, name) for name in STREAMS}
        for name in STREAMS:
            if (raw := self._raw(name)) is not None:
                self.raw.append(raw)
                encoding = getattr(self.before[name], "encoding", None) or "utf-8"
                writer = io.BufferedWriter(raw)
                wrapped = io.TextIOWrapper(writer, encoding, errors="backslashreplace", line_buffering=True)
                setattr(sys, name, wrapped)

    def _raw(self, name: str) -> Output | None:
        """Return the stream's descriptor; None for a stream without one, which a test or a notebook captures."""
        stream = self.before[name]
        if stream is None:  # closed before the process began
            return Output(os.open(os.devnull, os.O_WRONLY), name, self, broken="it is closed")
        try:
            stream.flush()
        except OSError:  # its own layers keep what they hold, and write it once the descriptor is moved
            pass
        except ValueError:
            return None
        try:
            return Output(stream.fileno(), name, self)
        except (OSError, ValueError, AttributeError):
            return None

    def log_to(self, path: Path) -> None:
        """Set where a stream goes that is broken, or will be."""
        self.log = path.absolute()
        os.environ[VARIABLE] = str(self.log)
        for raw in self.raw:
            raw.move()

    def warn(self, moved: Output, text: str) -> None:
        """Write a line to the log and to the other stream."""
        for raw in (moved, *(raw for raw in self.raw if raw is not moved and not raw.moved)):
            raw.write(text.encode())

    def restore(self) -> None:
        """Put the streams back as they were."""
        for name in STREAMS:
            if getattr(sys, name) is not self.before[name]:
                getattr(sys, name).flush()
                setattr(sys, name, self.before[name])


@contextmanager
def kept() -> Iterator[Outputs]:
    """Keep stdout and stderr writable while entered, whatever becomes of what they lead to.

    After an error they stay: its traceback is printed on them.
    """
    outputs = Outputs()
    try:
        yield outputs
    except SystemExit:
        outputs.restore()
        raise
    outputs.restore()
