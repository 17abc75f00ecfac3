"""The way of one prompt through the code, from its parquet row to the changed weight, as files in order.

    python -m recipes.lab.tour

Trains two steps of GRPO's lab in this process (4 prompts, 2 answers each) and prints every file of this repository
that the second step enters between drawing its prompts and the optimizer's step, with what the file is for: the first
sentence of its docstring. It is a reading list that cannot be out of date.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
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
# What measures, records or checks a prompt and changes nothing is left out.
OBSERVERS = ("core/tracking/", "core/trace", "core/checkpoint/", "core/errors.py", "core/algorithm/checks.py")


def visited(*overrides: str) -> list[str]:
    """Train two steps of the lab and return the files that the second one entered, in order.

    The lab's base model must be there.
    """
    from core.config import compose
    from core.ray_trainer import RayPPOTrainer

    files: dict[str, None] = {}

    def enter(frame: FrameType, event: str, _: Any) -> None:  # what sys.setprofile calls back
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/") and "/.venv/" not in path and path != __file__:
            files[path[len(str(ROOT)) + 1 :]] = None

    class Toured(RayPPOTrainer):
        """The trainer, watched from the first prompt of its last step to the end of its update."""

        def collect(self, metrics: Any) -> Any:
            if metrics.step == self.config.trainer.total_training_steps:
                sys.setprofile(enter)
            return super().collect(metrics)

        def update(self, batch: Any, metrics: Any) -> None:
            super().update(batch, metrics)
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as folder:
        settings = [*SETTINGS, f"trainer.default_local_dir={folder}/grpo/tour", *overrides]
        Toured(compose("grpo", settings)).init_workers().fit()
    return [file for file in files if not file.startswith(OBSERVERS)]


def purpose(file: str) -> str:
    """Return the first sentence of a file's docstring."""
    told = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(told.split()), maxsplit=1)[0]


def main() -> None:
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    argparse.ArgumentParser(prog="python -m recipes.lab.tour", **options).parse_args()
    from recipes.lab.prepare import prepare

    prepare()
    files = visited()
    for number, file in enumerate(files, 1):
        print(f"{number:3}  {file}\n     {purpose(file)}")
    print(f"{len(files)} files, from the row to the changed weight")


if __name__ == "__main__":
    main()
