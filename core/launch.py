"""The body of every ``main_<recipe>.py``: configuration, trainer, ``fit``. Bad input ends in a line, not in a traceback."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Collection

from core.config.cli import prepare

TRAINER = "core.ray_trainer:RayPPOTrainer"


def main(recipe: str, *, trainer: str = TRAINER, hooks: Collection[str] = ()) -> None:
    """Runs a recipe with the arguments of the command line.

    ``trainer`` is ``module:class``, imported only once the configuration is known to be good: a dry run needs
    neither torch nor a model. ``hooks`` names the hooks that the class overrides.
    """
    config = prepare(recipe, sys.argv[1:], hooks)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("core").setLevel(logging.INFO)
    module, _, name = trainer.partition(":")
    run = getattr(importlib.import_module(module), name)(config)
    try:
        run.init_workers()
    except _expected() as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    run.fit()
    print(f"{run.outcome()}; run folder {run.run_dir}", flush=True)


def _expected() -> tuple[type[Exception], ...]:
    """Faults of the input, whose messages name what to change; anything else keeps its traceback."""
    from core.manifest import CheckpointError
    from core.models import ModelError
    from core.plugins import PluginError
    from core.rewards import RewardConfigError
    from core.rows import DataError
    from core.run import RunError

    return CheckpointError, ModelError, PluginError, RewardConfigError, DataError, RunError
