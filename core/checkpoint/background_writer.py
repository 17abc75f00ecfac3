"""Checkpoints that are written on a thread while training goes on, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from core.checkpoint.provenance import Provenance
from core.checkpoint.store import CheckpointStore
from core.errors import WriteFailed, memory_phase

# Puts files into a folder and returns file -> SHA-256 of those that it hashed and put on disk.
Fill = Callable[[Path], Mapping[str, str]]

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes checkpoints of ``store``, and calls ``send`` with the step of each that is complete.

    ``saved_step`` is the newest complete one: of a resumed run, where it began.
    """

    def __init__(self, store: CheckpointStore, send: Callable[[int], None] | None = None):
        self.store, self._send = store, send
        self.saved_step: int | None = None
        self.begun_step: int | None = None
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, step: int, provenance: Provenance, copied: Callable[[], Fill]) -> None:
        """Copy the state and write it on the thread, both once the checkpoint before is complete, or has failed.

        ``copied`` runs now and returns what fills a folder.
        """
        self._settle()
        fill = copied()
        self.begun_step = step
        self._writing = self._thread.submit(self._write, step, provenance, fill)

    def _write(self, step: int, provenance: Provenance, fill: Fill) -> None:
        hashes: dict[str, str] = {}
        with memory_phase("save_checkpoint"), self.store.writing(step, provenance, hashes) as folder:
            hashes.update(fill(folder))
        if self._send is not None:
            self._send(step)

    def look(self) -> None:
        """Warn where a writing that has ended could not write, and raise what else it raised. Does not wait."""
        if self._writing is not None and self._writing.done():
            self._settle()

    def _settle(self) -> None:
        """Wait as :meth:`finish` does. A full disk is a warning: a run of days may find room before its next save."""
        try:
            self.finish()
        except WriteFailed as error:
            log.warning("%s. Training goes on, and the next checkpoint is another try", error)

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is complete. Raises what its writing raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                writing.result()
            except BaseException:
                self.begun_step = None  # so that the same step may be tried again
                raise
            self.saved_step = self.begun_step

    def close(self) -> None:
        """Let a checkpoint that was begun be completed, whatever ended the run, and end the thread."""
        step = self.begun_step
        try:
            self.finish()
        except Exception as error:  # the run has failed already: that error is raised, this one logged
            log.warning("the checkpoint of step %s was not completed: %s", step, error)
        self._thread.shutdown()
