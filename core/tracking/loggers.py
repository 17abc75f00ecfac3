"""What a person sees of a run while it goes on: progress, answers, and the loggers of
``trainer.logger``.

``metrics.jsonl`` is not among the loggers: the tracker always writes it, and first. A logger that
cannot begin ends a run before it trains; one that fails later is switched off. A class of your own
is named ``module:Class``: it is made with the :class:`Tracker` of the run, and has ``log`` and
``close``.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from core.config import convert, registry
from core.config.code_by_path import load_object
from core.errors import InputError, printable

if TYPE_CHECKING:
    from core.tracking.tracker import Tracker

Row = Mapping[str, Any]
DELAY_S, PAUSE_S = 2.0, 10.0  # what is over sooner needs no bar; between two lines of a log


INSTEAD = "or leave it out: metrics.jsonl is written anyway"


def check_loggers(names: Iterable[str]) -> None:
    """Raise InputError for loggers whose package is not installed, or whose class is not where its
    path says."""
    problems: list[str] = []
    for name in dict.fromkeys(names):
        entry = registry.logger(name)
        if entry.package and find_spec(entry.package) is None:
            rule = f"the package {entry.package} is not installed"
            problems.append(
                f"trainer.logger={name}: {rule}; pip install {entry.package}, {INSTEAD}"
            )
        elif entry.function:
            try:
                load_object(entry.function, "trainer.logger")
            except InputError as error:
                problems += error.problems
    if problems:
        raise InputError(problems)


class Loggers:
    """The loggers of a run. One that fails is switched off with a warning.

    Raises InputError: a logger could not begin, or what :func:`check_loggers` finds.
    """

    def __init__(self, run: Tracker) -> None:
        self._each: dict[str, Any] = {}
        check_loggers(run.config.trainer.logger)
        for name in dict.fromkeys(run.config.trainer.logger):
            function = registry.logger(name).function
            try:
                if name == "console":
                    self._each[name] = ConsoleLogger(run)
                elif function:  # jsonl has none: the tracker writes it
                    self._each[name] = load_object(function, "trainer.logger")(run)
            except Exception as error:
                fix = f"mend its login or address, {INSTEAD}"
                reason = f"could not begin ({type(error).__name__}: {error})"
                raise InputError(f"trainer.logger={name}: {reason}; {fix}") from error

    def call(self, method: str, *arguments: Any) -> None:
        """Call ``log`` or ``close`` of each, and switch off what fails: a server that is away may
        stay away."""
        for name, logger in list(self._each.items()):
            try:
                getattr(logger, method)(*arguments)
            except (Exception, SystemExit) as error:
                del self._each[name]
                reason = f"{method} failed ({type(error).__name__}: {error})"
                text = f"{reason}; it is switched off, and metrics.jsonl has every step"
                print(printable(f"warning: trainer.logger={name}: {text}"), file=sys.stderr)


# label on the console, names of the metric (the first that the step has), format
HEADLINE = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), ".3f"),
    ("acc", ("reward/acc/mean",), ".3f"),
    ("length", ("response_length/mean",), ".1f"),
    ("nll", ("actor/nll",), ".3f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("kl", ("actor/ppo_kl", "actor/kl_loss"), ".2e"),
    ("time", ("timing_s/step",), ".1f"),
    ("scorer failed on", ("reward/failed_rate",), ".1%"),  # shown where it is not 0
    ("scorer failed in validation on", ("reward/val_failed_rate",), ".1%"),
)


def write_line(line: str) -> None:
    """Print above the progress bar, where there is one."""
    from tqdm import tqdm

    tqdm.write(printable(line))
    sys.stdout.flush()


class ConsoleLogger:
    """One line a step."""

    def __init__(self, run: Tracker) -> None:
        self.run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = []
        for label, names, form in HEADLINE:
            value = next((values[name] for name in names if name in values), None)
            if label == "acc" and value is not None and not 0 <= value <= 1:
                continue  # a score, which the line has as reward
            if value or (value is not None and form != ".1%"):
                shown.append(f"{label} {value:{form}}")
        validated = [
            name for name in values if name.startswith("val-core/") and "/acc/mean@" in name
        ]
        for name in validated:
            label = name.removeprefix("val-core/")
            label = label if 0 <= values[name] <= 1 else label.replace("/acc/", "/score/")
            shown.append(f"{label} {values[name]:.3f}")
        total = f"/{self.run.manifest['total_steps']}" if "total_steps" in self.run.manifest else ""
        write_line(f"step {step}{total} | {' | '.join(shown)}")

    def close(self, failed: bool) -> None:
        pass


class TensorboardLogger:
    """Files in ``<run folder>/tensorboard``; a resumed run adds one, whose steps repeat those after
    its checkpoint."""

    def __init__(self, run: Tracker) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandbLogger:
    """Weights & Biases; ``WANDB_MODE=offline`` needs no login. A resumed run goes on under its
    manifest's id."""

    def __init__(self, run: Tracker) -> None:
        import wandb

        self._run = wandb.init(
            project=run.config.trainer.project_name,
            name=run.config.trainer.experiment_name,
            tags=[run.manifest["recipe"]],
            id=run.manifest["run_id"],
            resume="allow",
            dir=str(run.run_dir),
            config=convert.as_recorded(run.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


# --- progress and answers ---


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show ``total`` units of work while the block runs, and yield the function that counts one of
    them.

    A terminal has a bar; a log a line at most every tenth of the work and every PAUSE_S seconds.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(
            desc=what, total=total, unit=unit, delay=DELAY_S, leave=False, dynamic_ncols=True
        ) as bar:
            yield lambda: bar.update() and None
        return
    done, tenth, printed = 0, 0, time.monotonic()

    def count() -> None:
        nonlocal done, tenth, printed
        done += 1
        if 10 * done // max(1, total) > tenth and time.monotonic() - printed >= PAUSE_S:
            tenth, printed = 10 * done // max(1, total), time.monotonic()
            print(f"{what}: {done} of {total} {unit}s", file=sys.stderr, flush=True)

    yield count


def print_examples(rows: Iterable[Row], count: int) -> None:
    """Print the first ``count`` answers of each data source, under the headings that verl's
    managers print."""
    printed = Counter[Any]()
    for row in rows:
        printed[row["data_source"]] += 1
        if printed[row["data_source"]] <= count:
            write_line(
                f"[prompt] {row['input']}\n[response] {row['output']}\n[ground_truth] {row['gts']}"
            )
            write_line(f"[score] {row['score']:g}")
