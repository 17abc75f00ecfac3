"""A run folder's copy at a URL (``trainer.default_local_dir=s3://bucket/run``), for a run that changes machines.

Everything is written to the local run folder first. A complete checkpoint is then sent: the run's files, the
checkpoint's files, and its manifest last, so that a folder there with a manifest is a complete checkpoint. A start
fetches what is newer there than here. Two runs at one URL are noticed when one finds a checkpoint that it did not
send; no lock of an object store is relied on. Databases (a judge's replies) stay on their machine.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from core.checkpoint.store import LOCK, MANIFEST, NAME, TRACKER, CheckpointStore, DamagedCheckpoint, verify
from core.errors import InputError
from core.files import RemotePlace, check_writable, explained, inside, listing, make_parent, place, tried

KEY = "trainer.default_local_dir"
NOT_SENT = ("global_step_", ".tmp-", ".old-", ".trash-", "damaged-", LOCK)  # beginnings of names in a run folder
UNFINISHED = (".partial", ".old")  # endings of files and folders that are renamed once they are complete
DATABASES = (".db", ".db-wal", ".db-shm", ".db-journal")  # which another thread may be writing

log = logging.getLogger(__name__)


class RemoteCopy:
    """What is at ``url`` of the run whose checkpoints are those of ``store``."""

    def __init__(self, url: str, store: CheckpointStore):
        self.url, self.store = url.rstrip("/"), store
        self.newest = -1  # step that this process has seen or put there
        self._sent: dict[str, tuple[int, int]] = {}  # file of the run -> its state when it was sent
        self._place: RemotePlace | None = None

    @property
    def place(self) -> RemotePlace:
        if self._place is None:
            self._place = place(self.url, KEY)
        return self._place

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
                self._fetch("", self.store.root, without=[f"{each}*" for each in NOT_SENT])
            newer = [step for step in reversed(there) if step > own]
            if newer and not any(map(self._fetch_checkpoint, newer)) and not here:
                raise InputError(f"{KEY}={self.url}: every checkpoint there is damaged; to start over choose another")

    def _fetch(self, folder: str, into: Path, without: list[str]) -> None:
        """Fetch a folder of the run's; nothing where there is none."""
        source = RemotePlace(self.place.fs, f"{self.place.path}/{folder}".rstrip("/"))
        try:
            names = [name for name in listing(source, without) if name]
        except FileNotFoundError:
            return
        for name in names:
            target = inside(into, name, self.url)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.fs.get_file(f"{source.path}/{name}", str(target))

    def _fetch_checkpoint(self, step: int) -> bool:
        """Fetch one checkpoint; return whether it arrived as it was written."""
        final = self.store.folder(step)
        log.info("fetching %s/%s to %s", self.url, final.name, final)
        partial = final.with_name(f".tmp-{final.name}-{os.getpid()}")
        self._fetch(final.name, partial, without=[])
        self.store.adopt(partial, step)
        try:
            verify(final)
        except DamagedCheckpoint as error:
            log.warning("%s/%s is not taken: %s", self.url, final.name, error)
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
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            if file.name != MANIFEST or file.parent != folder:
                self._put(file, f"{target}/{file.relative_to(folder)}")
        self._put(folder / MANIFEST, f"{target}/{MANIFEST}")
        fs.pipe_file(f"{path}/{TRACKER}", f"{step}\n".encode())  # scripts read it: only a complete step is named
        self.newest = step
        for old in sorted({*there, step})[: -self.store.keep] if self.store.keep else ():
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
            if unfinished or name.startswith(NOT_SENT) or name.endswith((TRACKER, *DATABASES)):
                continue
            stat = file.stat()
            state = stat.st_size, stat.st_mtime_ns
            if self._sent.get(name) != state:
                self._put(file, f"{self.place.path}/{name}")
                self._sent[name] = state

    def _put(self, file: Path, target: str) -> None:
        make_parent(self.url, self.place.fs, target)
        self.place.fs.put_file(str(file), target)
