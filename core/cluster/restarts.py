"""A run in this process, from its trainer to its last line, restarted from a checkpoint when a process is lost."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core.config import convert
from core.errors import FULL, InputError, OutOfMemory, WorkersLost, WriteFailed, printable, write_failed
from core.tracking.health import UnhealthyRun

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger("core")


class PrintableFormatter(logging.Formatter):
    """Lines of a log may quote a model's text, whose control characters reach no terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def work(trainer: str, config: Config) -> None:
    """Train in this process and print the outcome."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)
    module, _, name = trainer.partition(":")
    run = train(getattr(importlib.import_module(module), name), config)
    print(f"{run.session.outcome()}; run folder {run.session.run_dir}", flush=True)


def train(trainer: Callable[[Config], Any], config: Config) -> Any:
    """Train to the end, restarting from the run's last checkpoint when a process dies or hangs."""
    limit, restarts = config.trainer.max_restarts, 0
    while True:
        run = trainer(config)
        try:
            _init_workers(run)
            run.fit()
            return run
        except UnhealthyRun as error:
            print(printable(str(error)), file=sys.stderr)
            raise SystemExit(1) from error
        except OutOfMemory as error:  # not restarted: it would end in the same way
            trace = run.session.run_dir / "out_of_memory.txt"
            try:
                trace.parent.mkdir(parents=True, exist_ok=True)
                trace.write_text(traceback.format_exc(), encoding="utf-8")
                where = f"the traceback is in {trace}"
            except OSError:
                where = traceback.format_exc()
            print(f"{error}; {where}", file=sys.stderr)
            raise SystemExit(1) from error
        except InputError as error:  # a disk that is full is no fault of the input
            print(printable(str(error)), file=sys.stderr)
            raise SystemExit(1 if isinstance(error, WriteFailed) else 2) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            traceback.print_exc()
            print(write_failed(error, error.filename or run.session.run_dir, "a file"), file=sys.stderr)
            raise SystemExit(1) from error
        except WorkersLost as error:
            if restarts >= limit or run.session.stop.requested:
                print(f"{error}\n(trainer.max_restarts={limit}: not started again)", file=sys.stderr)
                raise SystemExit(1) from error
            log.error("%s", error)
        restarts += 1
        if run.session.saved_step is not None:  # else this attempt left nothing to resume
            config = convert.replaced(config, {"trainer.resume_mode": "auto"})
        log.error("restart %d of %d, after step %d", restarts, limit, run.session.saved_step or 0)


def _init_workers(run: Any) -> None:
    try:
        run.init_workers()
    except InputError as error:
        print(printable(str(error)), file=sys.stderr)
        raise SystemExit(1 if isinstance(error, WriteFailed) else 2) from None
