"""Checkpoints that survive a kill at any moment.

A checkpoint is a folder ``<root>/global_step_N``. It is filled under a temporary name by its owners, every file and
folder is fsynced, a manifest with the hash of every file is added, and only then does it get its name, by one atomic
rename. So a folder called ``global_step_N`` was complete once, and the hashes tell whether it still is. The newest
complete one wins; ``latest_checkpointed_iteration.txt`` is for people and scripts and is never read here.

Names in the root::

    global_step_N                   a checkpoint
    .tmp-global_step_N-<pid>        being written, or left by a writer that was killed
    .trash-global_step_N            being deleted; renamed first, so that no half-deleted folder keeps the good name
    damaged-global_step_N           failed its verification at a resume; kept for people to look at
    latest_checkpointed_iteration.txt, .writer.lock

A writer takes the lock of the root (:meth:`CheckpointStore.claim`): two runs in one folder would delete each other's
work. Reading takes no lock and changes nothing. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.checkpoint.provenance import Provenance
from core.config.section import FrozenDict
from core.errors import InputError, WriteFailed, free_space, memory_phase
from core.files import damage, file_sha256, fsync, inside, is_url, local_path, name_of, write_atomic

if TYPE_CHECKING:
    from core.config.sections.trainer import TrainerConfig

FORMAT = 3
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".writer.lock"
NAME = re.compile(r"global_step_(0|[1-9]\d*)")
HASHERS = 8  # threads: hashing releases the interpreter lock

# Puts files into a folder and returns file -> SHA-256 of those that it hashed and put on disk.
Fill = Callable[[Path], Mapping[str, str]]

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- one folder


class DamagedCheckpoint(InputError):
    """A folder is not the complete checkpoint that was once written there."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete folder whose hashes were verified when this object was made."""

    folder: Path
    step: int
    files: Mapping[str, Mapping[str, Any]]  # name in the folder -> {"bytes", "sha256"}
    provenance: Provenance | None = None

    def path(self, name: str) -> Path:
        """Return the file or subfolder ``name``. Raises InputError where the manifest lists no such file."""
        if not any(file == name or file.startswith(f"{name}/") for file in self.files):
            raise InputError(f"{self.folder} holds no {name}; it holds {', '.join(sorted(self.files)) or 'nothing'}")
        return self.folder / name


def seal(folder: Path, step: int, provenance: Provenance | None, hashes: Mapping[str, str] = FrozenDict()) -> None:
    """Put everything in ``folder`` on disk, then a manifest that lists and hashes it, on disk too.

    ``hashes`` are the SHA-256 of files whose writers computed them; those are not read again.
    """
    paths = sorted(folder.rglob("*"))
    names = [str(path.relative_to(folder)) for path in paths if path.is_file()]
    for path in paths:
        fsync(path)
    sums = {**_hash_all(folder, [name for name in names if name not in hashes]), **hashes}
    body = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": sums[name]} for name in names},
        "provenance": None if provenance is None else dataclasses.asdict(provenance),
    }
    body = json.loads(json.dumps(body))  # as a reader will see it, so that the digest is of the same thing
    write_atomic(folder / MANIFEST, json.dumps({"sha256": _digest(body), "body": body}, indent=1))


def verify(folder: Path, *, hashes: bool = True) -> Checkpoint:
    """Check every file that the manifest of ``folder`` lists, and return the checkpoint.

    Without ``hashes`` presence and size only are compared.

    Raises:
        DamagedCheckpoint: names the file and what is wrong with it.
        InputError: written by a later version of this code.
    """
    body = _read_manifest(folder)
    for name, recorded in body["files"].items():
        try:
            size = inside(folder, name, folder / MANIFEST).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{folder}: {name} is missing ({error.strerror})") from error
        except InputError as error:
            raise DamagedCheckpoint(str(error)) from error
        if size != recorded["bytes"]:
            raise DamagedCheckpoint(f"{folder}: {name} has {size} bytes, the manifest says {recorded['bytes']}")
    if hashes:
        _check_content(folder, body["files"])
    saved = body["provenance"]
    try:
        return Checkpoint(folder, body["step"], body["files"], Provenance.from_json(saved) if saved else None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is not a manifest ({type(error).__name__}: {error})") from error


def _check_content(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, digest in _hash_all(folder, files).items():
        if digest != files[name]["sha256"]:
            raise DamagedCheckpoint(f"{folder}: {name} was altered: its SHA-256 is not the one in the manifest")
    for name in files:
        if name.endswith(".index.json"):  # transformers would read, and an export copy, what the names lead to
            try:
                problem = damage(folder / name)
            except InputError as error:
                raise DamagedCheckpoint(str(error)) from error
            if problem:
                raise DamagedCheckpoint(f"{folder}: {problem}")


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body, digest = manifest["body"], manifest["sha256"]
        shapes = [(int(entry["bytes"]), str(entry["sha256"])) for entry in body["files"].values()]
        if not isinstance(body["step"], int) or any(size < 0 for size, _ in shapes):
            raise ValueError("step or sizes are no numbers")
    except OSError as error:
        raise DamagedCheckpoint(f"{folder}: no readable {MANIFEST} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is not a manifest ({type(error).__name__}: {error})") from error
    if digest != _digest(body):
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} was altered: its own SHA-256 does not match")
    if body.get("format") != FORMAT:
        raise InputError(
            f"{folder} has format {body.get('format')}, this code reads {FORMAT}: resume with the code that wrote it"
        )
    named = NAME.fullmatch(folder.name)
    if named and int(named[1]) != body["step"]:
        raise DamagedCheckpoint(f"{folder}: the manifest is of step {body['step']}: the folder was renamed")
    return body


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hash_all(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of each file. Raises DamagedCheckpoint for one that cannot be read."""

    def sha256(name: str) -> str:
        try:
            return file_sha256(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{folder}: {name} cannot be read ({error.strerror})") from error

    with ThreadPoolExecutor(HASHERS) as pool:
        return dict(zip(names, pool.map(sha256, names), strict=True))


# ---------------------------------------------------------------- all of a run


class CheckpointStore:
    """The checkpoints of one run, under ``root``, which need not exist yet.

    ``keep`` is how many of the newest stay (``trainer.max_actor_ckpt_to_keep``); None keeps all. One more exists for
    the time of a write, so plan disk space for ``keep + 1``.
    """

    def __init__(self, root: str | os.PathLike[str], *, keep: int | None = None):
        if keep is not None and keep < 1:
            raise InputError(f"max_actor_ckpt_to_keep={keep}: must be null (keep all) or at least 1")
        self.root = Path(root)
        self.keep = keep
        self._lock: int | None = None

    # -- reading

    def steps(self) -> list[int]:
        """Return the steps for which a folder exists, complete or not, ascending."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:  # one look: with a stat a name a busy writer may seem to have none
            names = [entry.name for entry in entries if entry.is_dir()]
        return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)

    def complete_steps(self) -> list[int]:
        """Return the steps whose folders have all their files; hashes are not compared."""
        return [step for step in self.steps() if self._looks_complete(step)]

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def latest(self, *, tidy: bool = False) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None where there is no checkpoint at all.

        Damaged ones are skipped with a warning that names folder, file and reason. A writer that goes on from here
        asks to ``tidy``: damaged ones get another name, and what a killed writer did not prune is pruned.

        Raises:
            InputError: checkpoints exist and all are damaged: starting over silently would throw a run away.
        """
        damaged: dict[int, str] = {}
        while remaining := [step for step in self.steps() if step not in damaged]:
            try:
                checkpoint = verify(self.folder(remaining[-1]))
            except DamagedCheckpoint as error:
                # A writer may have pruned the folder while it was read: then it is gone, and there is a newer one.
                if self.folder(remaining[-1]).exists():
                    damaged[remaining[-1]] = str(error)
                continue
            for step, reason in damaged.items():
                log.warning("damaged checkpoint skipped: %s; using step %d instead", reason, checkpoint.step)
                if tidy:
                    self._set_aside(step)
            if tidy:
                self._prune(checkpoint.step)
            return checkpoint
        if damaged:
            reasons = "\n  ".join(damaged.values())
            raise InputError(
                f"every checkpoint in {self.root} is damaged:\n  {reasons}\nRestore one from a copy, or start over: "
                "move the folder away or choose another trainer.experiment_name"
            )
        return None

    def at(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Verify the folder or URL ``path`` (``trainer.resume_from_path``) and return its checkpoint.

        Raises:
            InputError: there is none, or it is damaged; another one is never taken instead.
        """
        folder = fetched(path, "trainer.resume_from_path")
        if not folder.is_dir():
            raise InputError(f"trainer.resume_from_path={path}: no such folder")
        if steps := CheckpointStore(folder).steps():
            raise InputError(
                f"trainer.resume_from_path={path}: this is a folder of checkpoints; name one of them, such as "
                f"{folder / f'global_step_{steps[-1]}'}"
            )
        return verify(folder)

    # -- writing

    def claim(self) -> None:
        """Make this process the root's only writer and clear away what killed writers left. Idempotent.

        The lock is the process's and goes with it, however it ends. Raises InputError where another process writes
        here, or the folder cannot be written.
        """
        if self._lock is not None:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # A POSIX record lock: a forked worker that outlives a killed driver does not inherit it.
            lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"cannot write checkpoints to {self.root}: {error}. Set trainer.default_local_dir to a folder that "
                "this user can write"
            ) from error
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InputError(
                    f"another process is writing checkpoints to {self.root}: two runs would delete each other's. "
                    "Wait for it to end, or choose another trainer.experiment_name"
                ) from error
            log.warning("%s cannot be locked (%s): make sure that only one run writes there", self.root, error.strerror)
            lock = -1
        self._lock = lock
        self._clear(".trash-", ".tmp-")

    @contextmanager
    def writing(
        self, step: int, provenance: Provenance | None = None, hashes: Mapping[str, str] = FrozenDict()
    ) -> Iterator[Path]:
        """Yield a temporary folder to fill; on leaving the block it becomes ``global_step_<step>``.

        Whoever writes (other processes included: their files must be closed and on this file system) fills the
        folder inside the block. Where the block or a write fails, the folder is removed and the earlier checkpoints
        stay as they are. ``hashes`` are file -> SHA-256, as far as writers have computed it when the block ends.

        Raises:
            WriteFailed: the disk is full, or not writable; whatever the block raises passes through.
        """
        self.claim()
        folder = self.root / f".tmp-global_step_{step}-{os.getpid()}"
        try:
            folder.mkdir()
            yield folder
            seal(folder, step, provenance, hashes)
            self._publish(folder, step)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            complete = self.complete_steps()
            intact = f"{self.folder(complete[-1])} is intact" if complete else "there is no earlier one"
            raise WriteFailed(
                f"the checkpoint of step {step} could not be written to {self.root}: {error} ({free_space(self.root)} "
                f"there); {intact}. Make room, or set another trainer.default_local_dir or a lower "
                "trainer.max_actor_ckpt_to_keep (one more is needed while writing), and resume"
            ) from error

    def adopt(self, folder: Path, step: int) -> None:
        """Give a filled folder its name; a folder that has it already is kept under another."""
        if self.folder(step).exists():
            self._set_aside(step)
        os.rename(folder, self.folder(step))

    def _publish(self, folder: Path, step: int) -> None:
        self.adopt(folder, step)
        fsync(self.root)
        write_atomic(self.root / TRACKER, f"{step}\n")
        self._prune(step)

    def _prune(self, sound: int) -> None:
        """Delete all but the ``keep`` newest complete ones, of any process; never the one known to be sound."""
        complete = [step for step in self.steps() if step != sound and self._looks_complete(step)]
        for step in [] if self.keep is None else complete[: max(0, len(complete) + 1 - self.keep)]:
            os.rename(self.folder(step), self.root / f".trash-global_step_{step}")
        self._clear(".trash-")

    def _clear(self, *prefixes: str) -> None:
        for prefix in prefixes:
            for leftover in self.root.glob(f"{prefix}global_step_*"):
                shutil.rmtree(leftover)

    def _looks_complete(self, step: int) -> bool:
        try:
            verify(self.folder(step), hashes=False)
        except InputError:
            return False
        return True

    def _set_aside(self, step: int) -> None:
        name = f"damaged-global_step_{step}"
        taken = len(list(self.root.glob(f"{name}*")))
        target = self.root / (f"{name}-{taken + 1}" if taken else name)
        os.rename(self.folder(step), target)
        log.warning("kept the folder that had the name of step %d as %s; delete it when it is of no use", step, target)


def fetched(path: str | os.PathLike[str], key: str) -> Path:
    """Return a path as it is, and for the URL of a checkpoint its copy on this machine.

    Raises InputError, which names ``key``; also for the URL of a whole run, all of which would be copied.
    """
    if is_url(path) and not NAME.fullmatch(name_of(str(path))):
        raise InputError(f"{key}={path}: names no checkpoint; give the URL of a global_step_N")
    return Path(local_path(path, key))


def resolve_resume(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """Return the checkpoint to go on from, or None to start from the base model. Claims the store unless ``val_only``.

    - ``auto``: the newest complete one of the run folder; damaged newer ones are set aside. None where there is none.
    - ``resume_path``: the one that ``trainer.resume_from_path`` names, of this run or of another.
    - ``disable``: none.

    Checkpoints in the run folder that are newer than the start are refused, not overwritten: what this run writes
    would lie among them, and the next ``auto`` would take one of theirs for one of its own.

    Raises:
        InputError: as above, or as :meth:`CheckpointStore.latest`, ``at`` and ``claim`` raise it.
    """
    if not trainer.val_only:
        store.claim()
    if trainer.resume_mode == "auto":
        return store.latest(tidy=not trainer.val_only)
    if trainer.resume_mode == "disable":
        chosen, what = None, "trainer.resume_mode=disable starts at step 0"
    else:
        chosen = store.at(trainer.resume_from_path)
        what = f"trainer.resume_from_path={trainer.resume_from_path} starts at step {chosen.step}"
    newer = [step for step in store.steps() if step > (chosen.step if chosen else -1)]
    if newer and not trainer.val_only:
        raise InputError(
            f"{what}, but {store.root} already holds global_step_{newer[-1]}, and two runs in one folder cannot be "
            "told apart. Choose another trainer.experiment_name (or trainer.default_local_dir), move the newer "
            "checkpoints away, or continue that run with trainer.resume_mode=auto"
        )
    return chosen


# ---------------------------------------------------------------- written while training goes on


class BackgroundWriter:
    """Writes checkpoints of ``store`` on a thread, one at a time, and calls ``send`` with the step of each.

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
