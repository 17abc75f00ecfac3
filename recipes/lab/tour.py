"""The way of one prompt through the code, from its parquet row to the changed weight, as files in order.

    python -m recipes.lab.tour

Trains two steps of GRPO's lab in this process (4 prompts, 2 answers each) and prints every file of this repository
that the second step enters between drawing its prompts and the optimizer's step, with the functions that were called.
It is a reading list that cannot be out of date: read the files in this order to follow the loop.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    *("preset=lab", "trainer.backend=local", "trainer.cpu_threads=1", "trainer.logger=[jsonl]"),
    *("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1"),
    *("trainer.save_freq=-1", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("actor_rollout_ref.rollout.n=2", "trainer.resume_mode=disable"),
)
# Timers, progress bars, recorders, invariant checks, kill points and error messages observe a prompt and change
# nothing: they are listed apart.
OBSERVERS = (
    *("core/tracking/step_time.py", "core/tracking/progress.py"),
    *(
        "core/trace/trace_recorder.py",
        "core/learner/traced_tokens.py",
    ),
    *("core/checkpoint/kill_points.py", "core/errors.py", "core/algorithm/invariants.py"),
    *("core/algorithm/use_checks.py", "core/tracking/step_checks.py", "core/tracking/recorders.py"),
)
TRAINER, SESSION = "core/ray_trainer.py", "core/session.py"


class Tour:
    """What was entered while the tour was on: file -> its functions in the order of their first call."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}
        self.session_calls = 0  # calls that the trainer makes into its session, or the session into the trainer
        self.on = False

    def enter(self, frame: FrameType, event: str, _: Any) -> None:
        """Take note of a function's first call: what ``sys.setprofile`` calls back."""
        if not self.on or event != "call" or frame.f_code.co_name.startswith("<"):
            return
        name = self._file(frame)
        if name is None:
            return
        functions = self.files.setdefault(name, [])
        if frame.f_code.co_name not in functions:
            functions.append(frame.f_code.co_name)
        caller = self._file(frame.f_back) if frame.f_back else None
        self.session_calls += {name, caller} == {TRAINER, SESSION}

    @staticmethod
    def _file(frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        inside = path.startswith(f"{ROOT}/") and "/.venv/" not in path and path != __file__
        return path[len(str(ROOT)) + 1 :] if inside else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread for as long as the block runs."""
        sys.setprofile(self.enter)
        try:
            yield
        finally:
            sys.setprofile(None)

    def lines(self) -> list[str]:
        """Return the tour as text: a line a file, in the order in which they were entered."""
        width, way = max(map(len, self.files)), self.way()
        listed = [f"{number:3}  {file:{width}}  {', '.join(self.files[file])}" for number, file in enumerate(way, 1)]
        passed = ", ".join(file for file in self.files if file in OBSERVERS)
        total = f"{len(way)} files, {self.session_calls} calls between trainer and session, row to weight"
        return [*listed, f"files that only observe: {passed}", total]

    def way(self) -> list[str]:
        """Return the files in the order in which they were entered, without those that only observe."""
        return [file for file in self.files if file not in OBSERVERS]


def take_tour(*overrides: str) -> Tour:
    """Train two steps of the lab and return what the second one entered. The lab's base model must be there."""
    from core.config import compose
    from core.ray_trainer import RayPPOTrainer

    tour = Tour()

    class Toured(RayPPOTrainer):
        """The trainer, watched from the first prompt of its last step to the end of its update."""

        def collect(self, metrics: Any) -> Any:
            tour.on = metrics.step == self.session.total_steps
            return super().collect(metrics)

        def update(self, batch: Any, metrics: Any) -> None:
            super().update(batch, metrics)
            tour.on = False

    with tempfile.TemporaryDirectory() as folder:
        settings = [*SETTINGS, f"trainer.default_local_dir={folder}/grpo/tour", *overrides]
        trainer = Toured(compose("grpo", settings)).init_workers()
        with tour.watched():
            trainer.fit()
    return tour


def main() -> None:
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    argparse.ArgumentParser(prog="python -m recipes.lab.tour", **options).parse_args()
    from core.safe_text.printable import printable
    from recipes.lab.prepare import prepare

    prepare()
    print(printable("\n".join(take_tour().lines())))


if __name__ == "__main__":
    main()
