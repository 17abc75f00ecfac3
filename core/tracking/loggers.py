"""The loggers of ``trainer.logger``, which show a run's numbers while it goes on: console, TensorBoard, wandb.

``metrics.jsonl`` is not among them: the tracker always writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from core.config import convert

if TYPE_CHECKING:
    from core.config.schema import Config

Row = Mapping[str, Any]

# label on the console, names of the metric (the first that the step has), format
_CONSOLE = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), ".3f"),
    ("acc", ("reward/acc/mean",), ".3f"),
    ("length", ("response_length/mean",), ".1f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("kl", ("actor/ppo_kl", "actor/kl_loss"), ".2e"),
    ("time", ("timing_s/step",), ".1f"),
)


@dataclass(frozen=True)
class LoggedRun:
    """The run whose numbers a logger shows."""

    config: Config
    run_dir: Path
    run_id: str
    resume_step: int | None


class Logger(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def samples(self, step: int, rows: Sequence[Row]) -> None: ...
    def close(self, failed: bool) -> None: ...


class ConsoleLogger:
    """One line a step, above the progress bar where there is one."""

    def __init__(self) -> None:
        self.total: int | None = None

    def write(self, line: str) -> None:
        tqdm.write(line)
        sys.stdout.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = [f"{label} {value:{form}}" for label, value, form in headline(values)]
        shown += [
            f"{name.removeprefix('val-core/')} {value:.3f}"
            for name, value in values.items()
            if name.startswith("val-core/") and "/acc/mean@" in name
        ]
        self.write(f"step {step}{f'/{self.total}' if self.total else ''} | " + " | ".join(shown))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        for row in rows:
            self.write(f"step {step} sample, score {row['score']}, expected {row['gts']!r}")
            self.write(f"    {str(row['input'])[-200:]!r} -> {str(row['output'])[:400]!r}")

    def close(self, failed: bool) -> None:
        pass


def headline(values: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    """Yield label, value and format of the few numbers that a person follows, where the step has them."""
    for label, names, form in _CONSOLE:
        found = next((values[name] for name in names if name in values), None)
        if found is not None:
            yield label, found, form


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
            id=run.run_id,
            resume="allow",
            dir=str(run.run_dir),
            config=convert.as_tree(run.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        data = [[step, str(row["input"]), str(row["output"]), str(row["gts"]), row["score"]] for row in rows]
        table = self._wandb.Table(columns=["step", "input", "output", "gts", "score"], data=data)
        self._run.log({"val/generations": table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
