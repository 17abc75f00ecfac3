"""The body of every ``main_<recipe>.py``: configuration, trainer, ``fit``. Bad input ends in a line, no traceback."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from core.config import convert
from core.config.cli import prepare
from core.health import UnhealthyRun
from core.interrupts import EXIT_STATUS, WorkersLost

if TYPE_CHECKING:
    from core.config.schema import Config

TRAINER = "core.ray_trainer:RayPPOTrainer"

log = logging.getLogger("core")


def main(recipe: str, *, trainer: str = TRAINER, hooks: Collection[str] = ()) -> None:
    """Runs a recipe with the arguments of the command line.

    ``trainer`` is ``module:class``, imported only once the configuration is known to be good: a dry run needs
    neither torch nor a model. ``hooks`` names the hooks that the class overrides. Exits with 2 where the input is at
    fault, with 1 where a process was lost and ``trainer.max_restarts`` allows no other try.
    """
    config = prepare(recipe, sys.argv[1:], hooks)
    if apart(config):
        raise SystemExit(_apart(trainer, config))
    work(trainer, config)


def apart(config: Config) -> bool:
    """Whether the loop gets a process of its own (:mod:`core.driver`): on a cluster, unless the key says otherwise."""
    wanted, address = config.ray_kwargs.driver_actor, config.ray_kwargs.ray_init.get("address")
    if wanted is None:
        wanted = (address or os.environ.get("RAY_ADDRESS", "local")) != "local"
    return wanted and config.trainer.backend == "ray"


def _apart(trainer: str, config: Config) -> int:
    from core.driver import oversee
    from core.workers import ClusterError, ray_backend

    try:
        place_driver = ray_backend("ray_driver").place_driver
        status = oversee(lambda config, restarts: place_driver(trainer, config, restarts), config)
        if status == EXIT_STATUS:  # of a second Ctrl-C: nobody waits for a Ray of our own to shut down tidily
            sys.stdout.flush()
            os._exit(status)
        return status
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 2


def work(trainer: str, config: Config, restarts: int = 0, began: Callable[[Any, int], None] = lambda *_: None) -> None:
    """The run, in this process. ``began(run, restarts)`` is called with each try's trainer."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    module, _, name = trainer.partition(":")
    run = train(getattr(importlib.import_module(module), name), config, restarts, began)
    print(f"{run.outcome()}; run folder {run.run_dir}", flush=True)


def train(trainer: Callable[[Config], Any], config: Config, restarts: int, began: Callable[[Any, int], None]) -> Any:
    """Trains to the end; starts again from the run's last checkpoint where a process dies or hangs."""
    limit = config.trainer.max_restarts
    while True:
        run = trainer(config)
        began(run, restarts)
        try:
            _start(run)
            run.fit()
            return run
        except UnhealthyRun as error:
            print(error, file=sys.stderr)
            raise SystemExit(1) from error
        except WorkersLost as error:
            if restarts >= limit or run.stop.requested:
                print(f"{error}\n(trainer.max_restarts={limit}: not started again)", file=sys.stderr)
                raise SystemExit(1) from error
            log.error("%s", error)
        restarts += 1
        if run.saved_step is not None:  # else as the first time: there is nothing of this run to go on from
            config = convert.replaced(config, {"trainer.resume_mode": "auto"})
        log.error("restart %d of %d, after step %d", restarts, limit, run.saved_step or 0)


def _start(run: Any) -> None:
    try:
        run.init_workers()
    except _expected() as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _expected() -> tuple[type[Exception], ...]:
    """Faults of the input, whose messages name what to change; anything else keeps its traceback."""
    from core.engines import EngineError
    from core.manifest import CheckpointError
    from core.models import ModelError
    from core.plugins import PluginError
    from core.rewards import RewardConfigError
    from core.rows import DataError
    from core.run import RunError
    from core.workers import ClusterError

    return CheckpointError, ClusterError, EngineError, ModelError, PluginError, RewardConfigError, DataError, RunError
