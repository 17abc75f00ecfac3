"""What a person sees of a running job: progress, answers, and the loggers of ``trainer.logger``.

``metrics.jsonl`` is not among the loggers: the tracker always writes it, and first. A logger that
cannot begin ends a run before it trains; one that fails later is switched off. A class of your own
is named ``module:Class``. It is made with a :class:`LoggedRun`, and has ``log`` and ``close``.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from core.config import convert, registry
from core.config.code_by_path import load_object
from core.config.schema import Config
from core.errors import InputError, printable

BAR_DELAY_S = 2.0  # work that ends sooner needs no progress bar
LINE_PAUSE_S = 10.0  # the least time between two lines of progress in a log
INSTEAD = "or leave it out: metrics.jsonl is written anyway"


class LoggedRun(Protocol):
    """What a logger is made with."""

    run_dir: Path
    config: Config
    manifest: Mapping[str, Any]


def check_loggers(names: Iterable[str]) -> None:
    """Raise InputError for loggers whose package or class is not there."""
    problems: list[str] = []
    for name in dict.fromkeys(names):
        entry = registry.logger(name)
        if entry.package and find_spec(entry.package) is None:
            problems.append(
                f"trainer.logger={name}: the package {entry.package} is not installed; "
                f"pip install {entry.package}, {INSTEAD}"
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

    def __init__(self, run: LoggedRun) -> None:
        self._each: dict[str, Any] = {}
        check_loggers(run.config.trainer.logger)
        for name in dict.fromkeys(run.config.trainer.logger):
            function = registry.logger(name).function
            try:
                if function:  # jsonl has none: the tracker writes it
                    self._each[name] = load_object(function, "trainer.logger")(run)
            except Exception as error:
                raise InputError(
                    f"trainer.logger={name}: could not begin ({type(error).__name__}: {error}); "
                    f"mend its login or address, {INSTEAD}"
                ) from error

    def call(self, method: str, *arguments: Any) -> None:
        """Call ``log`` or ``close`` of each logger.

        A logger that fails is switched off: a server that is away may stay away.
        """
        for name, logger in list(self._each.items()):
            try:
                getattr(logger, method)(*arguments)
            except (Exception, SystemExit) as error:
                del self._each[name]
                text = (
                    f"warning: trainer.logger={name}: {method} failed ({type(error).__name__}: "
                    f"{error}); it is switched off, and metrics.jsonl has every step"
                )
                print(printable(text), file=sys.stderr)


# Label on the console, names of the metric (the first that the step has is shown), format. Rates in
# percent are shown if they are above 0.
HEADLINE = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), ".3f"),
    ("acc", ("reward/acc/mean",), ".3f"),
    ("length", ("response_length/mean",), ".1f"),
    ("tool calls", ("tool_call_counts/mean",), ".2f"),
    ("nll", ("actor/nll",), ".3f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("update kl", ("actor/ppo_kl",), ".2e"),
    ("reference kl", ("actor/kl_loss",), ".2e"),
    ("time", ("timing_s/step",), ".1f"),
    ("scorer failed on", ("reward/failed_rate",), ".1%"),
    ("scorer failed in validation on", ("reward/val_failed_rate",), ".1%"),
)


def write_line(line: str) -> None:
    """Print above the progress bar, where there is one."""
    from tqdm import tqdm

    tqdm.write(printable(line))
    sys.stdout.flush()


class ConsoleLogger:
    """One line a step."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = []
        for label, names, form in HEADLINE:
            value = next((values[name] for name in names if name in values), None)
            if label == "acc" and value is not None and not 0 <= value <= 1:
                continue  # a score, which the line has as reward
            if label == "tool calls" and not value and values.get("num_turns/max", 1) <= 1:
                continue  # nothing plays episodes here
            if value or (value is not None and form != ".1%"):
                shown.append(f"{label} {value:{form}}")
        for name, value in values.items():
            if name.startswith("val-core/") and "/acc/mean@" in name:
                label = name.removeprefix("val-core/")
                if not 0 <= value <= 1:
                    label = label.replace("/acc/", "/score/")
                shown.append(f"{label} {value:.3f}")
        total_steps = self.run.manifest.get("total_steps")
        progress = f"{step}/{total_steps}" if total_steps is not None else str(step)
        write_line(f"step {progress} | {' | '.join(shown)}")

    def close(self, failed: bool) -> None:
        pass


class TensorboardLogger:
    """Writes files in ``<run folder>/tensorboard``.

    A resumed run adds a file, whose steps repeat those after its checkpoint.
    """

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandbLogger:
    """Logs to Weights & Biases; ``WANDB_MODE=offline`` needs no login.

    A resumed run continues under the id of its manifest.
    """

    def __init__(self, run: LoggedRun) -> None:
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


# -- progress and answers --------------------------------------------------------------------------


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show the progress of ``total`` units of work; yield the function that counts one of them.

    What is counted beyond the total is not shown.
    A terminal shows a bar. A log gets a line at most every tenth of the work and every
    LINE_PAUSE_S seconds.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(
            desc=what, total=total, unit=unit, delay=BAR_DELAY_S, leave=False, dynamic_ncols=True
        ) as bar:
            yield lambda: bar.update(bar.n < total) and None
        return
    done = 0
    printed_tenths = 0
    printed_at = time.monotonic()

    def count() -> None:
        nonlocal done, printed_tenths, printed_at
        done = min(done + 1, total)
        tenths = 10 * done // max(1, total)
        if tenths > printed_tenths and time.monotonic() - printed_at >= LINE_PAUSE_S:
            printed_tenths = tenths
            printed_at = time.monotonic()
            print(f"{what}: {done} of {total} {unit}s", file=sys.stderr, flush=True)

    yield count


def print_examples(rows: Iterable[Mapping[str, Any]], count: int) -> None:
    """Print the first ``count`` answers of each data source, under the headings of verl."""
    printed = Counter[Any]()
    for row in rows:
        printed[row["data_source"]] += 1
        if printed[row["data_source"]] <= count:
            write_line(
                f"[prompt] {row['input']}\n[response] {row['output']}\n[ground_truth] {row['gts']}"
            )
            write_line(f"[score] {row['score']:g}")
