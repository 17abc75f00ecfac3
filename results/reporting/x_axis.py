"""What a curve is drawn over: steps, or what a run had spent by a step in tokens, trajectories or hours.

A line of metrics stands for the steps since the line before it, so that a log of every tenth step counts all ten. A
copy that left lines out has the exact sums in ``total/*``, and a foreign log may have some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import InputError
from results.reporting.run_reader import RecordedRun

Metrics = Mapping[str, float]
TOTAL = "total/"


@dataclass(frozen=True)
class Axis:
    """``of_line`` reads what a step spent from its metrics and the run's configuration; None: it is not recorded."""

    label: str
    needs: str
    of_line: Callable[[Metrics, Mapping[str, Any]], float | None]


def _first(row: Metrics, *names: str) -> float | None:
    return next((row[name] for name in names if name in row), None)


def _trajectories(row: Metrics, config: Mapping[str, Any]) -> float | None:
    """Return the answers that the step drew: those of dropped groups too, where their number is recorded."""
    n, batch = config.get("actor_rollout_ref.rollout.n"), config.get("data.train_batch_size")
    prompts = row.get("collect/prompts_drawn", batch)
    return None if n is None or prompts is None else float(n * prompts)


def _hours(row: Metrics, config: Mapping[str, Any]) -> float | None:
    seconds = _first(row, "timing_s/whole", "timing_s/step")
    return None if seconds is None else seconds / 3600


AXES: Mapping[str, Axis] = {
    "step": Axis("step", "", lambda row, config: 1.0),
    "tokens": Axis(
        "tokens, prompts included", "perf/total_num_tokens", lambda row, config: row.get("perf/total_num_tokens")
    ),
    "trajectories": Axis("trajectories drawn", "data.train_batch_size and actor_rollout_ref.rollout.n", _trajectories),
    "hours": Axis("hours", "timing_s/whole or timing_s/step", _hours),
}


def totals(metrics: Sequence[Metrics], config: Mapping[str, Any], name: str) -> dict[float, float]:
    """Return ``step -> what the run had spent by then``; {} where no line records it."""
    axis, total, spent, before, recorded = AXES[name], TOTAL + name, 0.0, 0.0, False
    found: dict[float, float] = {}
    for row in metrics:
        step = row["step"]
        value = axis.of_line(row, config) if step > 0 else None
        if total in row:
            spent, recorded = row[total], True
        elif value is not None:
            spent, recorded = spent + value * (step - before), True
        found[step], before = spent, step
    return found if recorded else {}


def with_totals(metrics: Sequence[Metrics], config: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the lines with what the run had spent by each, as ``total/*``."""
    names = [name for name in AXES if name != "step"]
    spent = {TOTAL + name: totals(metrics, config, name) for name in names}
    return [{**row, **{key: by_step[row["step"]] for key, by_step in spent.items() if by_step}} for row in metrics]


def positions(run: RecordedRun, name: str) -> dict[float, float]:
    """Return ``step -> position on the axis`` of every line of the run.

    Raises:
        InputError: the run does not record what the axis needs.
    """
    if name == "step":
        return {row["step"]: row["step"] for row in run.metrics}
    found = totals(run.metrics, run.config, name)
    if not found:
        possible = [other for other in AXES if other == "step" or totals(run.metrics, run.config, other)]
        raise InputError(
            f"--x {name}: {run.name} does not record it (it needs {AXES[name].needs}); "
            f"--x can be {' or '.join(possible)} for this run"
        )
    return found
