"""The loggers of ``trainer.logger``, which show a run's numbers while it goes on: console, TensorBoard, wandb, MLflow.

``metrics.jsonl`` is not among them: the tracker always writes it, and first. A logger that cannot begin ends a new run
before it trains. Later a failing logger costs nothing but its own numbers: see :class:`Loggers`. A class of your own is
named ``module:Class``; it is made with a :class:`LoggedRun` and has the methods of :class:`Logger`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from core.config import convert, registry
from core.config.code_by_path import load_object
from core.errors import InputError, printable
from core.tracking.records import Row, json_line

if TYPE_CHECKING:
    from core.config.schema import Config

PATIENCE = 3  # failures in a row after which a logger is switched off: a service may be away for a step or two


@dataclass
class LoggedRun:
    """The run whose numbers a logger shows. ``sessions`` are its manifest's; ``total`` is set once the loop begins."""

    config: Config
    run_dir: Path
    run_id: str
    resume_step: int | None
    recipe: str = ""
    sessions: Sequence[Mapping[str, Any]] = ()
    total: int | None = None  # steps

    @property
    def group(self) -> str:
        """The experiment without its seed: runs of other seeds are in the same group."""
        seed = self.config.trainer.seed
        return re.sub(rf"[-_.]?seed[-_=]?{seed}(?!\d)", "", self.config.trainer.experiment_name).strip("-_.") or "seeds"

    @property
    def tags(self) -> dict[str, str]:
        """Recipe, preset and the model's name, those that are known."""
        words = shlex.split(self.sessions[0]["command"]) if self.sessions else []
        presets = [word.removeprefix("preset=") for word in words if word.startswith("preset=")]
        model = self.config.actor_rollout_ref.model.path.rstrip("/").rsplit("/", 1)[-1]
        named = {"recipe": self.recipe, "preset": presets[-1] if presets else "", "model": model}
        return {name: value for name, value in named.items() if value}


class Logger(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def samples(self, step: int, rows: Sequence[Row]) -> None: ...
    def close(self, failed: bool) -> None: ...


class Loggers:
    """The loggers of a run. Exceptions of one end neither the run nor the step: they are printed, and ``note`` is told.

    After PATIENCE failures in a row a logger is switched off until the run is resumed. metrics.jsonl has what it
    missed.

    Raises:
        ImportError: the package of a logger is not installed.
        InputError: a logger of a new run could not begin, or its class is not where ``trainer.logger`` says.
    """

    def __init__(self, run: LoggedRun, note: Callable[[str, str], None]) -> None:
        self._note, self._failures = note, Counter[str]()  # failures in a row
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
                reason = f"could not begin ({type(error).__name__}: {error})"
                if run.resume_step is None:
                    fix = "mend its login or address, or leave it out: metrics.jsonl is written anyway"
                    raise InputError(f"trainer.logger={name}: {reason}; {fix}") from error
                text = f"warning: trainer.logger={name}: {reason}; the resumed run goes on without it"
                print(text, file=sys.stderr)
                note(name, reason)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, logger in self._each.items():
            self._try(name, f"step {step}", logger.log, step, values)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        for name, logger in self._each.items():
            self._try(name, f"the samples of step {step}", logger.samples, step, rows)

    def close(self, failed: bool) -> None:
        self._failures.clear()  # also a logger that is off lets go of what it holds
        for name, logger in self._each.items():
            self._try(name, "its end", logger.close, failed)

    def _try(self, name: str, what: str, call: Callable[..., None], *arguments: Any) -> None:
        if self._failures[name] >= PATIENCE:
            return
        try:
            call(*arguments)
            self._failures[name] = 0
        except Exception as error:
            self._failures[name] += 1
            off = "; it is switched off until the run is resumed" if self._failures[name] == PATIENCE else ""
            reason = f"{type(error).__name__}: {error}"
            text = f"{what} was not logged ({reason}){off}; metrics.jsonl has it all"
            print(f"warning: trainer.logger={name}: {text}", file=sys.stderr)
            self._note(name, f"{what}: {reason}")


# --- the console ---

ACC = "reward/acc/mean"
# label on the console, names of the metric (the first that the step has), format
_HEADLINE = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), ".3f"),
    ("acc", (ACC,), ".3f"),
    ("length", ("response_length/mean",), ".1f"),
    ("nll", ("actor/nll",), ".3f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("kl", ("actor/ppo_kl", "actor/kl_loss"), ".2e"),
    ("time", ("timing_s/step",), ".1f"),
)
_FAILED = {  # metric -> its label, shown where it is not 0
    "reward/failed_rate": "scorer failed on",
    "reward/val_failed_rate": "scorer failed in validation on",
}


class ConsoleLogger:
    """One line a step, above the progress bar where there is one."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    def _write(self, line: str) -> None:
        tqdm.write(printable(line))
        sys.stdout.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = [f"{label} {value:{form}}" for label, value, form in headline(values)]
        shown += [f"{words} {values[name]:.1%}" for name, words in _FAILED.items() if values.get(name)]
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


def headline(values: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    """Yield label, value and format of the few numbers that a person follows, where the step has them."""
    a_score = values.get(ACC) == values.get("critic/score/mean") and not (
        values.get("critic/score/min", 0) >= 0 and values.get("critic/score/max", 1) <= 1
    )
    for label, names, form in _HEADLINE:
        value = next((values[name] for name in names if name in values), None)
        if value is not None and not (label == "acc" and a_score):  # the reward again, of a function that gives scores
            yield label, value, form


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
            tags=list(run.tags.values()),
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
    """MLflow, at MLFLOW_TRACKING_URI, or else in files at ``<run folder>/mlruns``.

    A resumed run goes on as the same run there, which a tag with the manifest's id finds. Steps after the checkpoint
    are then there twice: MLflow cannot take values back. It admits no ``@`` in names: ``mean@4`` is ``mean_at_4``.
    """

    ID = "rlrepro.run_id"
    VALUES, PARAMETERS, CHARACTERS = 1000, 100, 500  # of a request, and of a parameter

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it refuses file:, which mlflow-skinny needs
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.run_dir / "mlruns").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        trainer = run.config.trainer
        existing = self._client.get_experiment_by_name(trainer.project_name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(trainer.project_name)
        known = self._client.search_runs([experiment], f"tags.`{self.ID}` = '{run.run_id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {self.ID: run.run_id, "group": run.group, **run.tags}
        self._id = self._client.create_run(experiment, tags=tags, run_name=trainer.experiment_name).info.run_id
        settings = [Param(key, str(value)[: self.CHARACTERS]) for key, value in convert.as_json(run.config).items()]
        for first in range(0, len(settings), self.PARAMETERS):
            self._client.log_batch(self._id, params=settings[first : first + self.PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name.replace("@", "_at_"), float(value), now, step) for name, value in values.items()]
        for first in range(0, len(metrics), self.VALUES):
            self._client.log_batch(self._id, metrics=metrics[first : first + self.VALUES])

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._client.log_text(self._id, "".join(map(json_line, rows)), f"generations/{step}.jsonl")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
