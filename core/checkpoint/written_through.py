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
import time
from collections.abc import Callable
from pathlib import Path

from core.checkpoint.manifest import MANIFEST, NAME, DamagedCheckpoint, verify
from core.checkpoint.store import LOCK, CheckpointStore
from core.errors import InputError
from core.remote.cache import listing
from core.remote.urls import Remote, brief, explained, makes_folders, place

KEY = "trainer.default_local_dir"
NOT_SENT = ("global_step_", ".tmp-", ".old-", ".trash-", "damaged-", LOCK)  # beginnings of names in a run folder
PAUSES_S = (2.0, 20.0)  # before the second and the third try to send

log = logging.getLogger(__name__)


class RemoteRun:
    """What is at ``url`` of the run whose checkpoints are those of ``store``."""

    def __init__(self, url: str, store: CheckpointStore):
        self.url, self.store = url.rstrip("/"), store
        self.newest = -1  # step that this process has seen or put there
        self._sent: dict[str, tuple[int, int]] = {}  # file of the run -> size and time when it was sent
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
        found = [int(match[1]) for match in map(NAME.fullmatch, names) if match]
        return sorted(step for step in found if fs.exists(f"{path}/global_step_{step}/{MANIFEST}"))

    # -- at a start

    def open(self, *, writes: bool) -> None:
        """Check that the place can be written, and fetch the run's files and newest checkpoint where they are newer.

        Raises:
            InputError: no driver, no rights, out of reach; or every checkpoint there is damaged and there is none here.
        """
        fs, path = self.place
        if writes:
            with explained(self.url, KEY, "write"):
                self._parent(f"{path}/.writable")
                fs.pipe_file(f"{path}/.writable", b"may be deleted")
                fs.rm_file(f"{path}/.writable")
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
            target = self.store.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{path}/{name}", str(target))

    def _fetch(self, step: int) -> bool:
        """Fetch one checkpoint; return whether it arrived as it was written."""
        fs, path = self.place
        source, final = f"{path}/global_step_{step}", self.store.folder(step)
        log.info("fetching %s/global_step_%d to %s", self.url, step, final)
        partial = final.with_name(f".tmp-{final.name}-{os.getpid()}")
        for name in listing(Remote(fs, source)):
            target = partial / name
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
            self._try(lambda: self._send(step))

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
        for name in [*(name for name in files if name != MANIFEST), MANIFEST]:
            self._put(folder / name, f"{target}/{name}")
        self.newest = step
        complete = sorted({*there, step})
        for old in complete[: -self.store.keep] if self.store.keep else ():
            fs.rm_file(f"{path}/global_step_{old}/{MANIFEST}")
            fs.rm(f"{path}/global_step_{old}", recursive=True)

    def send_files(self) -> None:
        """Send what changed of the run's files: metrics, configuration, validations. Raises InputError as send does."""
        with explained(self.url, KEY, "write"):
            self._try(self._send_files)

    def _send_files(self) -> None:
        root = self.store.root
        for file in sorted(each for each in root.rglob("*") if each.is_file()):
            name, stat = str(file.relative_to(root)), file.stat()
            state = (stat.st_size, stat.st_mtime_ns)
            if name.startswith(NOT_SENT) or name.endswith(".partial") or self._sent.get(name) == state:
                continue
            self._put(file, f"{self.place.path}/{name}")
            self._sent[name] = state

    def _put(self, file: Path, target: str) -> None:
        self._parent(target)
        self.place.fs.put_file(str(file), target)

    def _parent(self, target: str) -> None:
        if makes_folders(self.url):
            self.place.fs.makedirs(target.rpartition("/")[0], exist_ok=True)

    def _try(self, send: Callable[[], None]) -> None:
        for pause in PAUSES_S:
            try:
                return send()
            except (InputError, PermissionError):
                raise
            except Exception as error:  # each driver has errors of its own
                log.warning("%s could not be written (%s): tried again in %g s", self.url, brief(error), pause)
                time.sleep(pause)
        return send()
