"""The loggers of ``trainer.logger``, which show a run's numbers while it goes on: console, TensorBoard, wandb, MLflow.

``metrics.jsonl`` is not among them: the tracker always writes it, and first. A logger that cannot begin ends a new run
before it trains. Later a failing logger costs nothing but its own numbers: see :class:`Loggers`. A class of your own is
named ``module:Class``; it is made with a :class:`LoggedRun` and has the methods of :class:`Logger`.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from core.config import Config, convert, registry
from core.config.code_by_path import load_object
from core.errors import InputError, printable

Row = Mapping[str, Any]
PATIENCE = 3  # failures in a row after which a logger is switched off: a service may be away for a step or two


@dataclass
class LoggedRun:
    """The run whose numbers a logger shows; ``total`` is set once the loop begins."""

    config: Config
    run_dir: Path
    run_id: str
    resume_step: int | None
    recipe: str = ""
    total: int | None = None  # steps

    @property
    def group(self) -> str:
        """The experiment without its seed: runs of other seeds are in the same group."""
        seed = self.config.trainer.seed
        return re.sub(rf"[-_.]?seed[-_=]?{seed}(?!\d)", "", self.config.trainer.experiment_name).strip("-_.") or "seeds"


class Logger(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def samples(self, step: int, rows: Sequence[Row]) -> None: ...
    def close(self, failed: bool) -> None: ...


class Loggers:
    """The loggers of a run. An exception of one is printed, and ends neither the run nor the step.

    After PATIENCE failures in a row a logger is switched off until the run is resumed. metrics.jsonl has what it
    missed.

    Raises:
        ImportError: the package of a logger is not installed.
        InputError: a logger of a new run could not begin, or its class is not where ``trainer.logger`` says.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._failures = Counter[str]()  # in a row
        self._each: dict[str, Logger] = {}
        for name in dict.fromkeys(run.config.trainer.logger):
            function = registry.logger(name).function
            try:
                if name == "console":
                    self._each[name] = ConsoleLogger(run)
                elif function:  # jsonl has none: the tracker writes it
                    self._each[name] = load_object(function, "trainer.logger")(run)
            except (ImportError, InputError):  # wrong whenever it is tried, unlike a service that is away
                raise
            except Exception as error:
                reason = f"trainer.logger={name}: could not begin ({type(error).__name__}: {error})"
                if run.resume_step is None:
                    fix = "mend its login or address, or leave it out: metrics.jsonl is written anyway"
                    raise InputError(f"{reason}; {fix}") from error
                print(f"warning: {reason}; the resumed run goes on without it", file=sys.stderr)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call(f"step {step}", "log", step, values)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._call(f"the samples of step {step}", "samples", step, rows)

    def close(self, failed: bool) -> None:
        self._failures.clear()  # also a logger that is off lets go of what it holds
        self._call("its end", "close", failed)

    def _call(self, what: str, method: str, *arguments: Any) -> None:
        for name in [name for name in self._each if self._failures[name] < PATIENCE]:
            try:
                getattr(self._each[name], method)(*arguments)
                self._failures[name] = 0
            except Exception as error:
                self._failures[name] += 1
                off = "; it is switched off until the run is resumed" if self._failures[name] == PATIENCE else ""
                text = f"{what} was not logged ({type(error).__name__}: {error}){off}; metrics.jsonl has it all"
                print(f"warning: trainer.logger={name}: {text}", file=sys.stderr)


# --- the console ---

ACC, SCORE = "reward/acc/mean", "critic/score"
# label on the console, names of the metric (the first that the step has), format
HEADLINE = (
    ("reward", ("critic/rewards/mean", f"{SCORE}/mean"), ".3f"),
    ("acc", (ACC,), ".3f"),
    ("length", ("response_length/mean",), ".1f"),
    ("nll", ("actor/nll",), ".3f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("kl", ("actor/ppo_kl", "actor/kl_loss"), ".2e"),
    ("time", ("timing_s/step",), ".1f"),
)
FAILED = {  # metric -> its label, shown where it is not 0
    "reward/failed_rate": "scorer failed on",
    "reward/val_failed_rate": "scorer failed in validation on",
}


class ConsoleLogger:
    """One line a step, above a progress bar where there is one."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    def _write(self, line: str) -> None:
        from tqdm import tqdm

        tqdm.write(printable(line))
        sys.stdout.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = []
        graded = values.get(f"{SCORE}/min", 0) < 0 or values.get(f"{SCORE}/max", 1) > 1
        for label, names, form in HEADLINE:
            value = next((values[name] for name in names if name in values), None)
            again = (
                label == "acc" and graded and value == values.get(f"{SCORE}/mean")
            )  # of a function that gives scores
            if value is not None and not again:
                shown.append(f"{label} {value:{form}}")
        shown += [f"{words} {values[name]:.1%}" for name, words in FAILED.items() if values.get(name)]
        for name in [name for name in values if name.startswith("val-core/") and "/acc/mean@" in name]:
            source, _, count = name.removeprefix("val-core/").partition("/acc/mean@")
            kind = "score" if f"val-aux/{source}/acc/min" in values else "acc"  # a value outside of 0 to 1: no accuracy
            shown.append(f"{source}/{kind}/mean@{count} {values[name]:.3f}")
        total = f"/{self.run.total}" if self.run.total else ""
        self._write(f"step {step}{total} | " + " | ".join(shown))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        for row in rows:
            self._write(f"step {step} sample, score {row['score']}, expected {row['gts']!r}")
            self._write(f"    {str(row['input'])[-200:]!r} -> {str(row['output'])[:400]!r}")

    def close(self, failed: bool) -> None:
        pass


# --- files and services ---


class TensorboardLogger:
    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(log_dir=str(run.run_dir / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        for i, row in enumerate(rows):
            text = "\n\n".join(f"**{key}** {row[key]}" for key in ("input", "output", "gts", "score"))
            self._writer.add_text(f"val/sample_{i}", text, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandbLogger:
    """Weights & Biases; ``WANDB_MODE=offline`` needs no login. A resumed run goes on under its manifest's id."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        trainer = run.config.trainer
        self._wandb = wandb
        self._run = wandb.init(
            project=trainer.project_name,
            name=trainer.experiment_name,
            group=run.group,
            tags=[run.recipe] if run.recipe else [],
            id=run.run_id,
            resume="allow",
            dir=str(run.run_dir),
            config=convert.as_recorded(run.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        data = [[step, str(row["input"]), str(row["output"]), str(row["gts"]), row["score"]] for row in rows]
        table = self._wandb.Table(columns=["step", "input", "output", "gts", "score"], data=data)
        self._run.log({"val/generations": table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowLogger:
    """MLflow, at MLFLOW_TRACKING_URI, or else in files at ``<run folder>/mlruns``. A resumed run is another run there.

    It admits no ``@`` in names: ``mean@4`` is ``mean_at_4``.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it refuses file:, which mlflow-skinny needs
        import mlflow

        self._mlflow, trainer = mlflow, run.config.trainer
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or (run.run_dir / "mlruns").resolve().as_uri())
        mlflow.set_experiment(trainer.project_name)
        tags = {"group": run.group, "recipe": run.recipe, "rlrepro.run_id": run.run_id}
        mlflow.start_run(run_name=trainer.experiment_name, tags=tags)
        mlflow.log_dict(convert.as_recorded(run.config), "config.yaml")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): float(value) for name, value in values.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._mlflow.log_dict({"rows": list(rows)}, f"generations/{step}.json")

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")
