"""Records of a run that could not be written: each costs a warning and itself, never the training.

For what a person reads afterwards: metrics, samples, validations, traces. Checkpoints are not among them, see
:mod:`core.checkpoint.background_writer`.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.errors import WriteFailed, unwritten
from core.files.durable_files import PARTIAL

log = logging.getLogger(__name__)


def step_of(path: Path) -> int:
    """Return the step of a record named ``step_N``, complete or not; -1 for another name."""
    number = path.name.split(".")[0].removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def drop_steps_after(folder: Path, step: int) -> None:
    """Remove the records of later steps, which a resumed run repeats, and what a kill left half written."""
    for path in folder.glob("step_*"):
        if step_of(path) > step or path.name.endswith(PARTIAL):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class Records:
    """Counts by name what was dropped. The first failure of a name in a row is a warning, and so is its end."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._failing: Counter[str] = Counter()

    def attempt(self, name: str, path: Path | str, write: Callable[[], Any], lost: str = "is dropped") -> bool:
        """Call ``write`` and return whether it worked. ``lost`` is what becomes of ``name`` where it did not."""
        try:
            write()
        except (OSError, WriteFailed) as error:
            reason = error if isinstance(error, WriteFailed) else unwritten(error, path, name)
            if not self._failing[name]:
                log.warning("%s: it %s, and the run goes on; make room there", reason, lost)
            self._failing[name] += 1
            self.dropped[name] += 1
            return False
        if failures := self._failing.pop(name, 0):
            log.warning("%s: %s can be written again, after %d that failed", path, name, failures)
        return True
