"""The body of every ``main_<recipe>.py``: configuration, trainer, ``fit``. Bad input ends in a line, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from core.cluster.restarts import work
from core.command_line import prepare
from core.config.checked import to_yaml
from core.config.paths import run_folder
from core.tracking import run_manifest

if TYPE_CHECKING:
    from core.config.schema import Config

TRAINER = "core.ray_trainer:RayPPOTrainer"
FINISHED = (
    "the run in {folder} has finished with this configuration and data, and nothing is trained. Its report: {report}. "
    "To train again, choose another trainer.experiment_name, or trainer.resume_mode=disable"
)


def main(recipe: str, *, trainer: str = TRAINER, hooks: Collection[str] = ()) -> None:
    """Run a recipe with the arguments of the command line.

    ``trainer`` is ``module:class``, imported only once the configuration is known to be good: a dry run needs
    neither torch nor a model. ``hooks`` names the hooks that the class overrides. Exits with 2 where the input is at
    fault, with 1 where a process was lost and ``trainer.max_restarts`` allows no other try.
    """
    config = prepare(recipe, sys.argv[1:], hooks)
    if (folder := finished_folder(config)) is not None:
        page = folder / "report.html"
        report = page if page.exists() else f"python -m results.report {folder}"
        print(FINISHED.format(folder=folder, report=report), flush=True)
        return
    work(trainer, config)


def finished_folder(config: Config) -> Path | None:
    """Return the run's folder where a run of the same configuration has ended in it, with or without checkpoints.

    Under ``trainer.resume_mode=disable`` a run trains again, and one that only validates always does.
    """
    folder, trainer = run_folder(config), config.trainer
    if trainer.val_only or trainer.resume_mode != "auto":
        return None
    try:
        manifest = run_manifest.read(folder / "manifest.json")
        same = (folder / "config.yaml").read_text(encoding="utf-8") == to_yaml(config)
    except (OSError, ValueError):  # there is none, or it is damaged, which the run's start reports
        return None
    same = same and manifest.get("data") == run_manifest.data_of(config)
    return folder if same and manifest["status"] == "finished" else None
