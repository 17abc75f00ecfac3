"""The loggers of ``trainer.logger``, which show a run's numbers elsewhere while it goes on: TensorBoard, wandb, MLflow.

``metrics.jsonl`` is not among them: the tracker always writes it, and first. A logger that cannot begin ends a new run
before it trains. Later a failing logger costs nothing but its own numbers: see :class:`Guarded`. A class of your own is
named ``module:Class``; it is made with a :class:`LoggedRun` and has the methods of :class:`Logger`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core.config import convert

if TYPE_CHECKING:
    from core.config.schema import Config

Row = Mapping[str, Any]


@dataclass(frozen=True)
class LoggedRun:
    """The run whose numbers a logger shows."""

    config: Config
    run_dir: Path
    run_id: str
    resume_step: int | None
    recipe: str = ""
    preset: str = ""

    @property
    def group(self) -> str:
        """The experiment without its seed: runs of other seeds are in the same group."""
        seed = self.config.trainer.seed
        return re.sub(rf"[-_.]?seed[-_=]?{seed}(?!\d)", "", self.config.trainer.experiment_name).strip("-_.") or "seeds"

    @property
    def tags(self) -> dict[str, str]:
        """Recipe, preset and the model's name, those that are known."""
        model = self.config.actor_rollout_ref.model.path.rstrip("/").rsplit("/", 1)[-1]
        return {k: v for k, v in (("recipe", self.recipe), ("preset", self.preset), ("model", model)) if v}


class Logger(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def samples(self, step: int, rows: Sequence[Row]) -> None: ...
    def close(self, failed: bool) -> None: ...


PATIENCE = 3  # failures in a row after which a logger is switched off: a service may be away for a step or two


class Guarded:
    """A logger whose exceptions end neither the run nor the step: they are printed and counted.

    After PATIENCE failures in a row the logger is switched off until the run is resumed. ``note`` is told so, for the
    manifest. What was missed is in metrics.jsonl.
    """

    def __init__(self, name: str, logger: Logger, note: Callable[[str, str], None]) -> None:
        self.name, self.logger, self._note, self._failures = name, logger, note, 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(f"step {step}", lambda: self.logger.log(step, values))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._try(f"the samples of step {step}", lambda: self.logger.samples(step, rows))

    def close(self, failed: bool) -> None:
        self._failures = min(self._failures, PATIENCE - 1)  # also one that is off lets go of what it holds
        self._try("its end", lambda: self.logger.close(failed))

    def _try(self, what: str, call: Callable[[], None]) -> None:
        if self._failures >= PATIENCE:
            return
        try:
            call()
        except Exception as error:
            self._failures += 1
            off = "; it is switched off until the run is resumed" if self._failures == PATIENCE else ""
            reason = f"{type(error).__name__}: {error}"
            print(
                f"warning: trainer.logger={self.name}: {what} was not logged ({reason}){off}; metrics.jsonl has it all",
                file=sys.stderr,
            )
            self._note(self.name, f"{what}: {reason}")
        else:
            self._failures = 0


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
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        self._client.log_text(self._id, text, f"generations/{step}.jsonl")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
