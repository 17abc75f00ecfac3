"""A run folder's copy at a URL (``trainer.default_local_dir=s3://bucket/run``), for a run that changes machines.

Everything is written to the local run folder first. A complete checkpoint is then sent: the run's files, the
checkpoint's files, and its manifest last, so that a folder there with a manifest is a complete checkpoint. A start
fetches what is newer there than here. Two runs at one URL are noticed when one finds a checkpoint that it did not
send; no lock of an object store is relied on.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from core.checkpoint.kill_points import kill_point
from core.checkpoint.manifest import MANIFEST, NAME, DamagedCheckpoint, verify
from core.checkpoint.store import LOCK, TRACKER, CheckpointStore
from core.errors import InputError
from core.files.file_names import inside
from core.files.remote.cache import listing
from core.files.remote.urls import Remote, explained, place
from core.files.remote.writing import check_writable, put_file, tried

KEY = "trainer.default_local_dir"
NOT_SENT = ("global_step_", ".tmp-", ".old-", ".trash-", "damaged-", LOCK)  # beginnings of names in a run folder
UNFINISHED = (".partial", ".old")  # endings of files and folders that are renamed once they are complete
DATABASE, BESIDE = ".db", ("-wal", "-shm", "-journal")  # of SQLite: what a judge replied, and loggers' own

log = logging.getLogger(__name__)


class RemoteRun:
    """What is at ``url`` of the run whose checkpoints are those of ``store``."""

    def __init__(self, url: str, store: CheckpointStore):
        self.url, self.store = url.rstrip("/"), store
        self.newest = -1  # step that this process has seen or put there
        self._sent: dict[str, tuple[tuple[int, int], ...]] = {}  # file of the run -> its state when it was sent
        self._found: Remote | None = None

    @property
    def place(self) -> Remote:
        if self._found is None:
            self._found = place(self.url, KEY)
        return self._found

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints there, ascending. Raises what the driver does."""
        fs, path = self.place
        fs.invalidate_cache()
        try:
            names = [entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []
        numbers = [int(match[1]) for match in map(NAME.fullmatch, names) if match]
        return sorted(step for step in numbers if fs.exists(f"{path}/global_step_{step}/{MANIFEST}"))

    # -- at a start

    def open(self, *, writes: bool) -> None:
        """Check that the place can be written, and fetch the run's files and newest checkpoint where they are newer.

        Raises:
            InputError: no driver, no rights, out of reach; or every checkpoint there is damaged and there is none here.
        """
        if writes:
            check_writable(self.url, KEY)
        with explained(self.url, KEY):
            there, here = self.steps(), self.store.complete_steps()
            self.newest, own = max(there, default=-1), max(here, default=-1)
            if self.newest > own or not (self.store.root / MANIFEST).exists():
                self._fetch_files()
            newer = [step for step in reversed(there) if step > own]
            if newer and not any(map(self._fetch, newer)) and not here:
                raise InputError(f"{KEY}={self.url}: every checkpoint there is damaged; to start over choose another")

    def _fetch_files(self) -> None:
        fs, path = self.place
        try:
            names = [name for name in listing(self.place, tuple(f"{each}*" for each in NOT_SENT)) if name]
        except FileNotFoundError:
            return
        for name in names:
            target = inside(self.store.root, name, self.url)
            target.parent.mkdir(parents=True, exist_ok=True)
            for beside in BESIDE if name.endswith(DATABASE) else ():  # of another state of the database
                target.with_name(target.name + beside).unlink(missing_ok=True)
            fs.get_file(f"{path}/{name}", str(target))

    def _fetch(self, step: int) -> bool:
        """Fetch one checkpoint; return whether it arrived as it was written."""
        fs, path = self.place
        source, final = f"{path}/global_step_{step}", self.store.folder(step)
        log.info("fetching %s/global_step_%d to %s", self.url, step, final)
        partial = final.with_name(f".tmp-{final.name}-{os.getpid()}")
        for name in listing(Remote(fs, source)):
            target = inside(partial, name, self.url)
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{source}/{name}", str(target))
        self.store.adopt(partial, step)
        try:
            verify(final)
        except DamagedCheckpoint as error:
            log.warning("%s/global_step_%d is not taken: %s", self.url, step, error)
            shutil.rmtree(final)
            return False
        return True

    # -- while a run goes on

    def send(self, step: int) -> None:
        """Send the run's files and the checkpoint of ``step``, then delete there what is beyond ``keep``.

        Raises:
            InputError: it cannot be written in three tries, or another run writes there; the local one is complete.
        """
        with explained(self.url, KEY, "write"):
            tried(lambda: self._send(step), self.url)

    def _send(self, step: int) -> None:
        fs, path = self.place
        there = self.steps()
        if there and there[-1] > max(self.newest, step):
            raise InputError(
                f"{KEY}={self.url}: global_step_{there[-1]} there is of another run that goes on; give this one "
                f"another URL. Its step {step} is complete in {self.store.folder(step)}"
            )
        self._send_files()
        target, folder = f"{path}/global_step_{step}", self.store.folder(step)
        if fs.exists(f"{target}/{MANIFEST}"):  # written anew: not complete until the new manifest is there
            fs.rm_file(f"{target}/{MANIFEST}")
        files = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
        for name in files:
            if name != MANIFEST:
                self._put(folder / name, f"{target}/{name}")
        kill_point("remote_manifest", step)
        self._put(folder / MANIFEST, f"{target}/{MANIFEST}")
        fs.pipe_file(f"{path}/{TRACKER}", f"{step}\n".encode())  # scripts read it: only a complete step is named
        self.newest = step
        complete = sorted({*there, step})
        for old in complete[: -self.store.keep] if self.store.keep else ():
            fs.rm_file(f"{path}/global_step_{old}/{MANIFEST}")
            fs.rm(f"{path}/global_step_{old}", recursive=True)

    def send_files(self) -> None:
        """Send what changed of the run's files: metrics, configuration, validations. Raises InputError as send does."""
        with explained(self.url, KEY, "write"):
            tried(self._send_files, self.url)

    def _send_files(self) -> None:
        for file in sorted(each for each in self.store.root.rglob("*") if each.is_file()):
            name = str(file.relative_to(self.store.root))
            unfinished = any(part.endswith(UNFINISHED) for part in name.split("/"))
            if unfinished or name.startswith(NOT_SENT) or name.endswith((TRACKER, *BESIDE)):
                continue
            state = _state(file)
            if state and self._sent.get(name) != state:
                self._put(file, f"{self.place.path}/{name}")
                self._sent[name] = state

    def _put(self, file: Path, target: str) -> None:
        """Copy a file there; of a database that is written to meanwhile, its last complete state.

        A database is read by SQLite alone: another reader of its files in this process would release its locks.
        """
        if file.suffix != DATABASE:
            return put_file(self.url, KEY, file, target)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, file.name)
            with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as into:
                source.backup(into)
            put_file(self.url, KEY, copy, target)


def _state(file: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes with a file's content, and with what lies beside a database; nothing for one that is gone."""
    beside = [file.with_name(file.name + end) for end in BESIDE] if file.suffix == DATABASE else []
    stats = [each.stat() for each in (file, *beside) if each.exists()]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
