"""Checkpoints that survive a kill at any moment.

A folder is filled under a temporary name by its owners, every file is hashed and fsynced, a
manifest of the hashes is added, and one atomic rename makes it ``<root>/global_step_N``. The newest
complete one wins. A run folder at a URL is a copy of the one here.
"""

import dataclasses
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from core.checkpoint.provenance import Provenance
from core.config.schema import TrainerConfig
from core.errors import InputError, WriteFailed, free_space
from core.files import (
    PARTIAL,
    check_writable,
    download,
    explained,
    file_sha256,
    fsync,
    inside,
    is_url,
    local_path,
    place,
    upload,
    write_atomic,
)

FORMAT = 5
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"  # for scripts; never read here
LOCK = ".writer.lock"
NAME = re.compile(r"global_step_(0|[1-9]\d*)")
KEY = "trainer.default_local_dir"
CHECKPOINTS = ("global_step_", ".tmp-", "damaged-")  # beginnings of names in a run folder
NOT_SENT = (PARTIAL, LOCK, TRACKER, ".db", ".db-wal", ".db-shm", ".db-journal")  # endings
HASHERS = 8  # threads: hashing releases the interpreter lock

log = logging.getLogger(__name__)


class DamagedCheckpoint(InputError):
    """A folder is not the complete checkpoint that was once written there."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete folder whose hashes were verified when this object was made.

    No writer deletes the folder until it is released: a run that only validates reads it beside one
    that trains.
    """

    folder: Path
    step: int
    files: Mapping[str, Mapping[str, Any]]  # name in the folder -> {"bytes", "sha256"}
    provenance: Provenance | None = None
    # The open manifest, whose lock ends with it
    lock: IO[str] | None = dataclasses.field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Let writers delete the folder, also where a forked process holds the open manifest."""
        with suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_UN)


def seal(folder: Path, step: int, provenance: Provenance | None, hashes: Mapping[str, str]) -> None:
    """Put everything in ``folder`` on disk, then a manifest of it.

    Files of ``hashes`` are not read again.
    """
    paths = sorted(folder.rglob("*"))
    for path in paths:
        fsync(path)
    names = [str(path.relative_to(folder)) for path in paths if path.is_file()]
    hashes = {**_hash_all(folder, [name for name in names if name not in hashes]), **hashes}
    files = {}
    for name in names:
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": hashes[name]}
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": files,
        "provenance": None if provenance is None else dataclasses.asdict(provenance),
    }
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1))


def verify(folder: Path) -> Checkpoint:
    """Check every file that the manifest of ``folder`` lists, and return the checkpoint.

    Raises DamagedCheckpoint, and InputError where another version wrote it.
    """
    try:
        lock = (folder / MANIFEST).open(encoding="utf-8")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        manifest = json.load(lock)
        if manifest["format"] != FORMAT:
            rule = f"has format {manifest['format']}, this code reads {FORMAT}"
            raise InputError(f"{folder} {rule}: resume with the code that wrote it")
        step = manifest["step"]
        files = manifest["files"]
        saved = manifest["provenance"]
        match = NAME.fullmatch(folder.name)
        if match and int(match[1]) != step:
            raise DamagedCheckpoint(f"{folder}: the folder was renamed, it is of step {step}")
        for name, entry in files.items():
            size = inside(folder, name, folder / MANIFEST).stat().st_size
            if size != entry["bytes"]:
                rule = f"has {size} bytes, the manifest lists {entry['bytes']}"
                raise DamagedCheckpoint(f"{folder}: {name} {rule}")
        for name, digest in _hash_all(folder, files).items():
            if digest != files[name]["sha256"]:
                rule = "was altered: its SHA-256 is not the one in the manifest"
                raise DamagedCheckpoint(f"{folder}: {name} {rule}")
        return Checkpoint(folder, step, files, Provenance(**saved) if saved else None, lock)
    except OSError as error:
        name = Path(error.filename or MANIFEST).name
        rule = f"{name} is missing or cannot be read ({error.strerror})"
        raise DamagedCheckpoint(f"{folder}: {rule}") from error
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        rule = f"{MANIFEST} is not a manifest ({type(error).__name__}: {error})"
        raise DamagedCheckpoint(f"{folder}: {rule}") from error


@contextmanager
def unread(folder: Path) -> Iterator[bool]:
    """Yield whether no process reads the checkpoint. None begins to read it in the block."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(folder / MANIFEST, "r+b"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # no manifest, or a file system without locks
            pass
        yield True


def _hash_all(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return name -> SHA-256 of the files of these names."""
    with ThreadPoolExecutor(HASHERS) as pool:
        return dict(zip(names, pool.map(file_sha256, map(folder.joinpath, names)), strict=True))


def steps_among(names: Iterable[str]) -> list[int]:
    """Return the steps of those names that a checkpoint may have, ascending."""
    return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)


class CheckpointStore:
    """The checkpoints of one run, under ``root``, which need not exist yet.

    Reading takes no lock and changes nothing. ``keep`` is how many of the newest stay
    (``trainer.max_actor_ckpt_to_keep``); None keeps all.
    """

    def __init__(self, root: str | os.PathLike[str], *, keep: int | None = None):
        self.root = Path(root)
        self.keep = keep
        self._lock: int | None = None

    def steps(self) -> list[int]:
        """Return the steps for which a folder exists, complete or not, ascending."""
        if not self.root.is_dir():
            return []
        # One look: with a call for each name a busy writer may seem to have no checkpoint
        with os.scandir(self.root) as entries:
            return steps_among([entry.name for entry in entries if entry.is_dir()])

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None where there is no checkpoint at all.

        Damaged ones are skipped with a warning. Raises InputError where all are: starting over
        would throw a run away.
        """
        damaged: dict[int, str] = {}
        while remaining := [step for step in self.steps() if step not in damaged]:
            newest = self.folder(remaining[-1])
            try:
                checkpoint = verify(newest)
            except DamagedCheckpoint as error:
                # A writer that pruned the folder while it was read has a newer one
                if newest.exists():
                    damaged[remaining[-1]] = str(error)
                continue
            for reason in damaged.values():
                used = checkpoint.step
                log.warning("damaged checkpoint skipped: %s; using step %d instead", reason, used)
            return checkpoint
        if damaged:
            fix = "restore one from a copy, or choose another trainer.experiment_name to start over"
            summary = f"every checkpoint in {self.root} is damaged; {fix}"
            raise InputError([*damaged.values(), summary])
        return None

    def claim(self) -> None:
        """Make this process the root's only writer and clear away what killed writers left.

        The lock goes with the process, however it ends. A second call does nothing. Raises
        InputError where the lock is taken, or nothing can be written.
        """
        if self._lock is not None:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            # A POSIX record lock: a forked grader that outlives a killed driver does not inherit it
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            rule = f"checkpoints cannot be written there ({error.strerror})"
            if isinstance(error, BlockingIOError):
                rule = "another process is writing checkpoints there"
            fix = "wait for it to end, or set another folder"
            raise InputError(f"{KEY}={self.root}: {rule}; {fix}") from error
        self._lock = lock
        self._clear()

    @contextmanager
    def writing(
        self,
        step: int,
        provenance: Provenance | None = None,
        hashes: Mapping[str, str] | None = None,
    ) -> Iterator[Path]:
        """Yield a temporary folder to fill, which becomes ``global_step_<step>``.

        It is removed where anything fails. ``hashes`` are file -> SHA-256 of the files that the
        block knows. Raises WriteFailed for a full disk.
        """
        self.claim()
        folder = self.root / f".tmp-global_step_{step}-{os.getpid()}"
        try:
            folder.mkdir()
            yield folder
            seal(folder, step, provenance, hashes or {})
            self._publish(folder, step)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise WriteFailed(
                f"{self.root}: the checkpoint of step {step} could not be written ({error}; "
                f"{free_space(self.root)}); written are those of steps {self.steps()}. Make room, "
                f"or set another {KEY}, and resume"
            ) from error

    def adopt(self, folder: Path, step: int) -> None:
        """Give a filled folder its name. A folder that has it is renamed, for people to look at."""
        final = self.folder(step)
        if final.exists():
            os.rename(final, self.root / f"damaged-{final.name}-{time.time_ns()}")
        os.rename(folder, final)

    def _publish(self, folder: Path, step: int) -> None:
        self.adopt(folder, step)
        fsync(self.root)
        write_atomic(self.root / TRACKER, f"{step}\n")
        self._prune(step)

    def _prune(self, sound: int) -> None:
        """Delete all but the ``keep`` newest ones, of any process, and never the sound one.

        One that another process reads is left for the next time.
        """
        older = [step for step in self.steps() if step != sound]
        surplus = 0 if self.keep is None else max(0, len(older) + 1 - self.keep)
        for step in older[:surplus]:
            with unread(self.folder(step)) as free:
                if free:  # renamed first: no half-deleted folder has the name of a complete one
                    os.rename(self.folder(step), self.root / f".tmp-global_step_{step}-deleted")
        self._clear()

    def _clear(self) -> None:
        for leftover in self.root.glob(".tmp-global_step_*"):
            shutil.rmtree(leftover)


def checkpoint_at(path: str | os.PathLike[str], key: str) -> Checkpoint:
    """Verify the folder or URL ``path`` that ``key`` names, and return its checkpoint.

    Raises InputError, also for the URL of a run's folder, all of which would be copied.
    """
    if is_url(path) and not NAME.fullmatch(str(path).rstrip("/").rpartition("/")[2]):
        raise InputError(f"{key}={path}: names no checkpoint; give the URL of a global_step_N")
    folder = Path(os.path.expanduser(local_path(path, key)))
    if not (folder / "actor").is_dir():
        raise InputError(f"{key}={path}: is not a checkpoint; name a global_step_N")
    return verify(folder)


def resolve_resume(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """Return the checkpoint to go on from by ``trainer.resume_mode``. None: from the base model.

    Claims the store unless ``val_only``. Raises InputError, also where the folder has newer ones
    than the start: the next start would take one of theirs for its own.
    """
    if not trainer.val_only:
        store.claim()
    if trainer.resume_mode == "auto":
        return store.latest()
    chosen = None
    if trainer.resume_mode == "resume_path":
        chosen = checkpoint_at(trainer.resume_from_path, "trainer.resume_from_path")
    start = chosen.step if chosen else 0
    newer = [step for step in store.steps() if step > start or chosen is None]
    if newer and not trainer.val_only:
        raise InputError(
            f"trainer.resume_mode={trainer.resume_mode} starts at step {start}, but {store.root} "
            f"already holds global_step_{newer[-1]}; choose another trainer.experiment_name, move "
            "the newer checkpoints away, or continue that run with trainer.resume_mode=auto"
        )
    return chosen


class RemoteCopy:
    """The copy at ``url`` of the run folder of ``store``.

    A checkpoint there is complete once it has its manifest.
    """

    def __init__(self, url: str, store: CheckpointStore):
        self.url = url.rstrip("/")
        self.store = store
        self.newest = -1  # step that this process has seen or put there
        self._sent: dict[str, tuple[int, int]] = {}  # file of the run -> its state when it was sent

    def files(self) -> list[str]:
        """Return the names of all files there, relative to the URL. Raises InputError."""
        fs, path = place(self.url, KEY)
        with explained(self.url, KEY):
            fs.invalidate_cache()
            return [full.removeprefix(f"{path}/") for full in fs.find(path)]

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints there, ascending."""
        manifests = [name for name in self.files() if name.endswith(f"/{MANIFEST}")]
        return steps_among([name.removesuffix(f"/{MANIFEST}") for name in manifests])

    def open(self, *, writes: bool) -> None:
        """Check that the place can be written, and fetch what is newer there than here.

        Raises InputError.
        """
        if writes:
            check_writable(self.url, KEY)
        self.newest = max(self.steps(), default=-1)
        newer = self.newest > max(self.store.steps(), default=-1)
        if newer or not (self.store.root / MANIFEST).exists():
            names = [name for name in self.files() if not name.startswith(CHECKPOINTS)]
            self._fetch(names, self.store.root)
        if newer:
            final = self.store.folder(self.newest)
            log.info("fetching %s/%s to %s", self.url, final.name, final)
            partial = final.with_name(f".tmp-{final.name}-{os.getpid()}")
            within = f"{final.name}/"
            self._fetch([name for name in self.files() if name.startswith(within)], partial, within)
            self.store.adopt(partial, self.newest)

    def _fetch(self, names: Collection[str], folder: Path, within: str = "") -> None:
        fs, path = place(self.url, KEY)
        for name in names:
            target = inside(folder, name.removeprefix(within), self.url)
            download(fs, f"{path}/{name}", target, KEY, self.url)

    def send(self, step: int) -> None:
        """Send the run's files and the checkpoint of ``step``, and delete what is beyond ``keep``.

        Raises WriteFailed, and InputError for a checkpoint there that this run did not send:
        another run writes there.
        """
        there = self.steps()
        folder = self.store.folder(step)
        if there and there[-1] > max(self.newest, step):
            rule = f"global_step_{there[-1]} there is of another run that goes on"
            fix = f"give this one another URL. Its step {step} is complete in {folder}"
            raise InputError(f"{KEY}={self.url}: {rule}; {fix}")
        self.send_files()
        fs, path = place(self.url, KEY)
        with explained(self.url, KEY, writing=True):
            if step in there:  # written anew: not complete until the new manifest is there
                fs.rm_file(f"{path}/{folder.name}/{MANIFEST}")
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file != folder / MANIFEST:
                    self.put(f"{folder.name}/{file.relative_to(folder)}", file)
            self.put(f"{folder.name}/{MANIFEST}", folder / MANIFEST)
            self.put(TRACKER, f"{step}\n".encode())  # scripts read it: it names a complete step
            self.newest = step
            steps = sorted({*there, step})
            for old in steps[: -self.store.keep] if self.store.keep else ():
                fs.rm_file(f"{path}/global_step_{old}/{MANIFEST}")
                fs.rm(f"{path}/global_step_{old}", recursive=True)

    def send_files(self) -> None:
        """Send what changed of the run's files: metrics, configuration, validations.

        Raises WriteFailed.
        """
        for file in sorted(self.store.root.rglob("*")):
            path = file.relative_to(self.store.root)
            name = str(path)
            if name.startswith(CHECKPOINTS) or not file.is_file():
                continue
            if any(part.endswith(NOT_SENT) for part in path.parts):
                continue
            state = file.stat().st_size, file.stat().st_mtime_ns
            if self._sent.get(name) != state:
                self.put(name, file)
                self._sent[name] = state

    def put(self, name: str, content: Path | bytes) -> None:
        """Write a file there. Raises WriteFailed."""
        upload(self.url, KEY, name, content)
