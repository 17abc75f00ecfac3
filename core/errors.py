"""The errors that callers tell apart, and text that a terminal may show."""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from core.secret_keys import without_given

# Spaces of other widths, and characters that join and part letters of several scripts, change only
# the look of a text
SHOWN = "\n\t\u00a0\u2002\u2003\u2009\u200c\u200d\u202f\u3000"


def printable(text: str, but: str = SHOWN) -> str:
    """Return the text without secrets, and with escapes for control characters except ``but``.

    A terminal would obey control characters.
    """
    text = without_given(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Return the text with escapes for line breaks, controls and broken characters."""
    return printable(text, but="")


LISTED = 5  # nodes or processes that a message names


def listed(names: Iterable[str], shown: int = LISTED) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"


class InputError(ValueError):
    """Input that cannot be used: one line a problem, each with key or file, value, rule and fix.

    The launcher prints the lines as they are and exits with 2; every other exception keeps its
    traceback.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


@dataclass
class Problems:
    """Collects everything that is wrong, so that it is reported together."""

    # (file or key, rule, fix) -> the rows that break the rule
    rows: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    shown: int = 10  # rows that a line names

    def add(
        self, where: str, rule: str, fix: str, row: int | str | None = None, value: str = ""
    ) -> None:
        """Add a problem. ``where`` is a file or a key; rows that break one rule share a line."""
        rows = self.rows.setdefault((where, rule, fix), [])
        if row is not None:
            rows.append(f"{row}: {value}" if value else str(row))

    def lines(self) -> list[str]:
        """Return one line a problem."""
        lines = []
        for (where, rule, fix), rows in self.rows.items():
            if rows:
                noun = "row" if len(rows) == 1 else "rows"
                rule += f" in {len(rows)} {noun} ({listed(rows, self.shown)})"
            lines.append(f"{where}: {rule}; {fix}")
        return lines

    def raise_if_any(self) -> None:
        """Raise InputError with all problems."""
        if self.rows:
            raise InputError(self.lines())


def message_of(error: BaseException) -> str:
    """Return an error's text with its notes, which name the process that raised it."""
    return " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])


class BrokenInvariant(RuntimeError):
    """Values of a step contradict each other: a bug here or in a user's hook, and no setting."""


class WorkersLost(RuntimeError):
    """A process of the run died or hangs. Another try from the last checkpoint may succeed."""


class NoRoom(InputError):
    """The cluster has no room for the run's processes.

    It is too small, others hold it, or nodes were lost.
    """


class UnhealthyRun(RuntimeError):
    """A bound of ``trainer.health`` that ends a run was crossed; the run is saved and ended."""


# -- disks -----------------------------------------------------------------------------------------


class WriteFailed(InputError):
    """A file could not be written: the disk is full, or refuses it.

    Another try may succeed once there is room.
    """


# Errors that a line explains better than a traceback
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def write_failed(error: OSError, path: str | os.PathLike[str], what: str) -> WriteFailed:
    """Return the error to raise in place of an OSError.

    It names the file, its content, the reason and the free space. An error with notes is one of
    another machine, of whose disk nothing is known here.
    """
    notes = getattr(error, "__notes__", None)
    details = ", ".join(notes) if notes else free_space(Path(path))
    return WriteFailed(
        f"{path}: {what} could not be written ({error.strerror or error}; {details}); make room "
        "there, and repeat the command"
    )


def free_space(path: Path) -> str:
    """Return the free space on the disk of a path, which need not exist, in words."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    disk = os.statvfs(place)
    return f"{disk.f_bavail * disk.f_frsize / 2**30:.1f} GiB free"


@contextmanager
def writing(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Raise WriteFailed if the block cannot write ``what`` to ``path``."""
    try:
        yield
    except OSError as error:
        raise write_failed(error, path, what) from error


# -- memory ----------------------------------------------------------------------------------------


class OutOfMemory(RuntimeError):
    """A phase needed more memory than its process had left.

    Another try would end in the same way.
    """


_ENGINE = "actor_rollout_ref.rollout.gpu_memory_utilization or max_num_seqs"
_ACTOR = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_CRITIC = "critic.ppo_max_token_len_per_gpu"
# Phase -> the keys that lower its memory, and cannot change the result
MEMORY_KEYS = {
    **dict.fromkeys(("gen", "gen_ahead", "wait_ahead", "generate", "testing"), _ENGINE),
    **dict.fromkeys(("old_log_prob", "ref", "update_actor"), _ACTOR),
    **dict.fromkeys(("values", "update_critic"), _CRITIC),
    "reward_model": "reward_model.forward_max_token_len_per_gpu",
}


def out_of_memory(
    error: BaseException, phase: str, where: str = "in this process"
) -> OutOfMemory | None:
    """Return the error to raise in place of a failed allocation; None for any other error.

    A failed allocation is recognized by name and text: this module loads no torch, and an error may
    come from another process.
    """
    by_name = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    by_text = re.search(r"CUDA.*out of memory|can't allocate memory", str(error))
    if isinstance(error, OutOfMemory) or not (by_name or by_text):
        return None
    # The text may have the amounts
    details = one_line(" ".join(str(error).split())[:300]) or type(error).__name__
    keys = MEMORY_KEYS.get(
        phase, "actor_rollout_ref.rollout.gpu_memory_utilization, or offload the learner's state"
    )
    return OutOfMemory(
        f"out of memory in phase {phase} {where}: lower {keys}; TROUBLESHOOTING.md has more "
        f"({details})"
    )


@contextmanager
def memory_phase(phase: str) -> Iterator[None]:
    """Raise OutOfMemory with this phase if an allocation fails in the block."""
    try:
        yield
    except Exception as error:
        failed_allocation = out_of_memory(error, phase)
        if failed_allocation is not None:
            raise failed_allocation from error
        raise
