"""Checkpoints that survive a kill at any moment.

A checkpoint is a folder ``<root>/global_step_N``. It is written under a temporary name, every file and
directory is fsynced, a manifest with the hash of every file is added, and only then does it get its name, by
one atomic rename. So a folder called ``global_step_N`` was complete once, and the hashes tell whether it
still is. The newest complete one wins; ``latest_checkpointed_iteration.txt`` is a convenience for people
and scripts and is never read here.

Names in the root::

    global_step_N                   a checkpoint
    .tmp-global_step_N-<pid>        being written, or left by a writer that was killed
    .old-global_step_N              replaced by a new one of the same step; put back if the new one did not arrive
    .trash-global_step_N            being deleted; renamed first, so that no half-deleted folder keeps the good name
    damaged-global_step_N           failed its verification at a resume; kept for people to look at
    latest_checkpointed_iteration.txt, .writer.lock

A writer takes the lock of the root (:meth:`CheckpointStore.claim`): two runs in one folder would delete each
other's work. Reading takes no lock and changes nothing.

The caller fills the folder; ``core/checkpoint/run_state.py`` and ``core/learner/hf_export.py`` have the parts.
Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from core.checkpoint.kill_points import kill_point
from core.checkpoint.manifest import NAME, Checkpoint, DamagedCheckpoint, seal, verify
from core.checkpoint.provenance import Provenance
from core.config.locations import is_url, local_path, name_of
from core.config.section import FrozenDict
from core.errors import InputError, WriteFailed, free_space
from core.files.durable_files import fsync, write_atomic

if TYPE_CHECKING:
    from core.config.sections.trainer import TrainerConfig

TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".writer.lock"

log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, under ``root``.

    Args:
        root: the run folder; need not exist yet.
        keep: how many of the newest to keep (``trainer.max_actor_ckpt_to_keep``); None keeps all. One more exists
            for the time of a write, so plan disk space for ``keep + 1``.
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
        with os.scandir(
            self.root
        ) as entries:  # one look: with a stat for each name a busy writer may seem to have none
            names = [entry.name for entry in entries if entry.is_dir()]
        return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)

    def complete_steps(self) -> list[int]:
        """Return the steps whose folders have all their files; hashes are not compared."""
        return [step for step in self.steps() if self._looks_complete(step)]

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def latest(self, *, tidy: bool = False) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None where there is no checkpoint at all.

        Damaged ones are skipped with a warning that names folder, file and reason.

        Args:
            tidy: for a writer that goes on from here: rename the damaged ones to ``damaged-global_step_N``, so that
                they are not taken later, and prune what a killed writer did not get to.

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
        inside = CheckpointStore(folder).steps()
        if inside:
            raise InputError(
                f"trainer.resume_from_path={path}: this is a folder of checkpoints; name one of them, such as "
                f"{folder / f'global_step_{inside[-1]}'}"
            )
        return verify(folder)

    # -- writing

    def claim(self) -> None:
        """Make this process the root's only writer and clear away what killed writers left. Idempotent.

        The lock is the process's and goes with it, however it ends.

        Raises:
            InputError: another process writes here, or the folder cannot be written.
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
            self._lock = -1
            return
        self._lock = lock
        self._put_back()
        self._clear(".old-", ".trash-", ".tmp-")

    @contextmanager
    def writing(
        self, step: int, provenance: Provenance | None = None, hashes: Mapping[str, str] = FrozenDict()
    ) -> Iterator[Path]:
        """Yield a temporary folder to fill; on leaving the block it becomes ``global_step_<step>``.

        Whoever writes (other processes included: their files must be closed and on this file system) fills the
        folder inside the block. On the way out: manifest, fsync of everything, rename, tracker file, pruning. Where
        the block or a write fails, the folder is removed and the earlier checkpoints stay as they are.

        Args:
            hashes: file in the folder -> SHA-256, as far as writers have computed it when the block ends.

        Raises:
            WriteFailed: the disk is full, or not writable; whatever the block raises passes through.
        """
        self.claim()
        folder = self.root / f".tmp-global_step_{step}-{os.getpid()}"
        try:
            folder.mkdir()
            yield folder
            kill_point("checkpoint_write", step)
            seal(folder, step, provenance, hashes)
            kill_point("checkpoint_rename", step)
            self._publish(folder, step)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            self._put_back()
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
        """Give a folder that was fetched its name; a damaged one that has it is kept under another."""
        if self.folder(step).exists():
            self._set_aside(step)
        os.rename(folder, self.folder(step))

    def _publish(self, folder: Path, step: int) -> None:
        final = self.folder(step)
        if final.exists():  # written before: a damaged folder is kept under another name, a complete one replaced
            try:
                verify(final)
            except InputError as error:
                log.warning("%s; written anew", error)
                self._set_aside(step)
            else:
                os.rename(final, self.root / f".old-{final.name}")
        os.rename(folder, final)
        fsync(self.root)
        kill_point("checkpoint_tracker", step)
        write_atomic(self.root / TRACKER, f"{step}\n")
        self._prune(step)

    def _prune(self, sound: int) -> None:
        """Delete all but the ``keep`` newest complete ones, of any process; never the one known to be sound."""
        complete = [step for step in self.steps() if step != sound and self._looks_complete(step)]
        surplus = [] if self.keep is None else complete[: max(0, len(complete) + 1 - self.keep)]
        for step in surplus:
            os.rename(self.folder(step), self.root / f".trash-global_step_{step}")
            kill_point("checkpoint_prune", sound)
        self._clear(".old-", ".trash-")

    def _put_back(self) -> None:
        """Undo a replacement that got no further than the first of its two renames."""
        for old in self.root.glob(".old-global_step_*"):
            replacement = self.root / old.name.removeprefix(".old-")
            if not replacement.exists():
                os.rename(old, replacement)

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
        log.warning("kept the damaged checkpoint as %s; delete it when it is of no use", target)


def fetched(path: str | os.PathLike[str], key: str) -> Path:
    """Return a path as it is, and for the URL of a checkpoint its copy on this machine.

    Raises:
        InputError: the URL names no ``global_step_N``, for whose sake a whole run would be copied; or as
            :func:`core.config.locations.local_path` does. It names ``key``.
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
