"""What checks and keeps a step beside training it: recorders, which ``fit`` calls at named moments.

The first are the kernel's checks (:mod:`core.tracking.step_checks`). Extensions declare theirs as
``functions["recorder"]``; a run has those that its configuration asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.types import ScoredGroup, StepMetrics, TrainBatch

if TYPE_CHECKING:
    from core.algorithm.kl import KLController
    from core.config.schema import Config

TRACED = ("log_prob", "ratio", "entropy", "clip", "loss", "loss_weight")  # what an update keeps of numbered rows


@dataclass(frozen=True)
class RecordedRun:
    """What a recorder is made of."""

    config: Config
    tokenizer: Any
    trainer: type  # the recipe's
    total_steps: int


@dataclass(frozen=True)
class Moment:
    """A step as a recorder finds it: with its groups, its metrics so far, the models and the KL controller."""

    groups: Sequence[ScoredGroup]
    metrics: StepMetrics
    kl: KLController
    workers: Any


class Recorder:
    """Base of a recorder: it keeps nothing. What it returns may number rows, and never changes what they hold."""

    def filtered(self, group: ScoredGroup, kept: bool) -> None:
        """See a group of which ``keep_group`` was asked; groups come in any order."""

    def begin(self, batch: TrainBatch, now: Moment) -> TrainBatch:
        """Begin the step, before its first phase, and return its batch."""
        return batch

    def after(self, phase: str, batch: TrainBatch, metrics: StepMetrics) -> None:
        """See what a phase (``log_probs``, ``advantages`` or ``update``) made of the batch."""

    def record(self, batch: TrainBatch, now: Moment) -> dict[str, float]:
        """Keep the step after its update and return what that cost, as metrics."""
        return {}


class Recorders(Recorder):
    """The recorders of a run, each called in turn."""

    def __init__(self, each: Sequence[Recorder] = ()):
        self.each = tuple(each)

    @classmethod
    def of(cls, run: RecordedRun) -> Recorders:
        """Return those that the run's configuration asks for."""
        if not run.config.trainer.trace.used:
            return cls()
        from core.trace import trace_recorder

        return cls([trace_recorder.recorder(run)])

    def recording_filter(self, keep_group: Callable[[ScoredGroup], bool]) -> Callable[[ScoredGroup], bool]:
        """Return ``keep_group`` that tells the recorders what it returns."""

        def filtered(group: ScoredGroup) -> bool:
            kept = keep_group(group)
            self.filtered(group, kept)
            return kept

        return filtered

    def filtered(self, group: ScoredGroup, kept: bool) -> None:
        for one in self.each:
            one.filtered(group, kept)

    def begin(self, batch: TrainBatch, now: Moment) -> TrainBatch:
        for one in self.each:
            batch = one.begin(batch, now)
        return batch

    def after(self, phase: str, batch: TrainBatch, metrics: StepMetrics) -> None:
        for one in self.each:
            one.after(phase, batch, metrics)

    def record(self, batch: TrainBatch, now: Moment) -> dict[str, float]:
        return {name: value for one in self.each for name, value in one.record(batch, now).items()}


def drop_after(run_dir: Path, step: int) -> None:
    """Remove what recorders kept of later steps, which a resumed run repeats, whatever it records itself."""
    from core.trace import trace_recorder

    trace_recorder.drop_after(run_dir, step)
