"""The body of every ``main_<recipe>.py``: configuration, trainer, ``fit``. Bad input ends in a line, no traceback."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from core.config import convert
from core.config.cli import prepare
from core.interrupts import WorkersLost

if TYPE_CHECKING:
    from core.config.schema import Config

TRAINER = "core.ray_trainer:RayPPOTrainer"

log = logging.getLogger("core")


def main(recipe: str, *, trainer: str = TRAINER, hooks: Collection[str] = ()) -> None:
    """Runs a recipe with the arguments of the command line.

    ``trainer`` is ``module:class``, imported only once the configuration is known to be good: a dry run needs
    neither torch nor a model. ``hooks`` names the hooks that the class overrides. Exits with 2 where the input is at
    fault, with 1 where a worker was lost and ``trainer.max_restarts`` allows no other try.
    """
    config = prepare(recipe, sys.argv[1:], hooks)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    module, _, name = trainer.partition(":")
    run = train(getattr(importlib.import_module(module), name), config)
    print(f"{run.outcome()}; run folder {run.run_dir}", flush=True)


def train(trainer: Callable[[Config], Any], config: Config) -> Any:
    """Trains to the end; starts again from the run's last checkpoint where a worker dies or hangs."""
    restarts = config.trainer.max_restarts
    for restart in range(restarts + 1):
        run = trainer(config)
        try:
            _start(run)
            run.fit()
            return run
        except WorkersLost as error:
            if restart == restarts:
                print(f"{error}\n(trainer.max_restarts={restarts}: not started again)", file=sys.stderr)
                raise SystemExit(1) from error
            log.error("%s", error)
        if run.saved_step is not None:  # else as the first time: there is nothing of this run to go on from
            config = convert.replaced(config, {"trainer.resume_mode": "auto"})
        log.error("restart %d of %d, after step %d", restart + 1, restarts, run.saved_step or 0)


def _start(run: Any) -> None:
    try:
        run.init_workers()
    except _expected() as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _expected() -> tuple[type[Exception], ...]:
    """Faults of the input, whose messages name what to change; anything else keeps its traceback."""
    from core.manifest import CheckpointError
    from core.models import ModelError
    from core.plugins import PluginError
    from core.rewards import RewardConfigError
    from core.rows import DataError
    from core.run import RunError
    from core.workers import ClusterError

    return CheckpointError, ClusterError, ModelError, PluginError, RewardConfigError, DataError, RunError
