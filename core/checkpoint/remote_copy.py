"""A run folder's copy at a URL (``trainer.default_local_dir=s3://bucket/run``), for a run that changes machines.

Everything is written to the local run folder first. A complete checkpoint is then sent: the run's files, the
checkpoint's files, and its manifest last, so that a folder there with a manifest is a complete checkpoint. A start
fetches what is newer there than here. Two runs at one URL are noticed when one finds a checkpoint that it did not
send; no lock of an object store is relied on. Databases (a judge's replies) stay on their machine.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from core.checkpoint.store import LOCK, MANIFEST, NAME, TRACKER, CheckpointStore, DamagedCheckpoint, verify
from core.errors import InputError
from core.files import PARTIAL, check_writable, download, explained, inside, place, upload

KEY = "trainer.default_local_dir"
CHECKPOINTS = ("global_step_", ".tmp-", "damaged-")  # beginnings of names in a run folder
NOT_SENT = (PARTIAL, ".old", LOCK, TRACKER, ".db", ".db-wal", ".db-shm", ".db-journal")  # endings

log = logging.getLogger(__name__)


class RemoteCopy:
    """What is at ``url`` of the run whose checkpoints are those of ``store``."""

    def __init__(self, url: str, store: CheckpointStore):
        self.url, self.store = url.rstrip("/"), store
        self.newest = -1  # step that this process has seen or put there
        self._sent: dict[str, tuple[int, int]] = {}  # file of the run -> its state when it was sent

    @functools.cached_property
    def place(self) -> tuple[Any, str]:
        return place(self.url, KEY)

    def files(self) -> list[str]:
        """Return the names of all files there, relative to the URL. Raises InputError where it cannot be read."""
        fs, path = self.place
        with explained(self.url, KEY):
            fs.invalidate_cache()
            return [full.removeprefix(f"{path}/") for full in fs.find(path)]

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints there, ascending."""
        manifests = [name.removesuffix(f"/{MANIFEST}") for name in self.files() if name.endswith(f"/{MANIFEST}")]
        return sorted(int(match[1]) for match in map(NAME.fullmatch, manifests) if match)

    def open(self, *, writes: bool) -> None:
        """Check that the place can be written, and fetch the run's files and newest checkpoint where they are newer.

        Raises:
            InputError: no driver, no rights, out of reach; or every checkpoint there is damaged and there is none here.
        """
        if writes:
            check_writable(self.url, KEY)
        there, here = self.steps(), self.store.complete_steps()
        self.newest, own = max(there, default=-1), max(here, default=-1)
        if self.newest > own or not (self.store.root / MANIFEST).exists():
            for name in self.files():
                if not name.startswith(CHECKPOINTS):
                    self._fetch(name, inside(self.store.root, name, self.url))
        newer = [step for step in reversed(there) if step > own]
        if newer and not any(map(self._fetch_checkpoint, newer)) and not here:
            raise InputError(f"{KEY}={self.url}: every checkpoint there is damaged; to start over choose another")

    def _fetch(self, name: str, target: Path) -> None:
        fs, path = self.place
        download(fs, f"{path}/{name}", target, KEY, self.url)

    def _fetch_checkpoint(self, step: int) -> bool:
        """Fetch one checkpoint; return whether it arrived as it was written."""
        final = self.store.folder(step)
        log.info("fetching %s/%s to %s", self.url, final.name, final)
        partial = final.with_name(f".tmp-{final.name}-{os.getpid()}")
        for name in self.files():
            if name.startswith(f"{final.name}/"):
                self._fetch(name, inside(partial, name.removeprefix(f"{final.name}/"), self.url))
        self.store.adopt(partial, step)
        try:
            verify(final)
        except DamagedCheckpoint as error:
            log.warning("%s/%s is not taken: %s", self.url, final.name, error)
            shutil.rmtree(final)
            return False
        return True

    def send(self, step: int) -> None:
        """Send the run's files and the checkpoint of ``step``, then delete there what is beyond ``keep``.

        Raises WriteFailed; InputError where another run writes there. The checkpoint here is complete.
        """
        there = self.steps()
        if there and there[-1] > max(self.newest, step):
            raise InputError(
                f"{KEY}={self.url}: global_step_{there[-1]} there is of another run that goes on; give this one "
                f"another URL. Its step {step} is complete in {self.store.folder(step)}"
            )
        self.send_files()
        fs, path = self.place
        folder = self.store.folder(step)
        with explained(self.url, KEY, writing=True):
            if step in there:  # written anew: not complete until the new manifest is there
                fs.rm_file(f"{path}/{folder.name}/{MANIFEST}")
            for file in sorted(each for each in folder.rglob("*") if each.is_file() and each != folder / MANIFEST):
                self.put(f"{folder.name}/{file.relative_to(folder)}", file)
            self.put(f"{folder.name}/{MANIFEST}", folder / MANIFEST)
            self.put(TRACKER, f"{step}\n".encode())  # scripts read it: only a complete step is named
            self.newest = step
            for old in sorted({*there, step})[: -self.store.keep] if self.store.keep else ():
                fs.rm_file(f"{path}/global_step_{old}/{MANIFEST}")
                fs.rm(f"{path}/global_step_{old}", recursive=True)

    def send_files(self) -> None:
        """Send what changed of the run's files: metrics, configuration, validations. Raises WriteFailed."""
        for file in sorted(each for each in self.store.root.rglob("*") if each.is_file()):
            name = str(file.relative_to(self.store.root))
            if name.startswith(CHECKPOINTS) or any(part.endswith(NOT_SENT) for part in name.split("/")):
                continue
            state = file.stat().st_size, file.stat().st_mtime_ns
            if self._sent.get(name) != state:
                self.put(name, file)
                self._sent[name] = state

    def put(self, name: str, content: Path | bytes) -> None:
        """Write a file there. Raises WriteFailed."""
        upload(self.url, KEY, name, content)
