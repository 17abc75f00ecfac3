"""Forecasts of where a run will end, from its first half, and how well they did on the runs that are published.

A forecast is the sigmoid of :mod:`results.reporting.scaling` over steps, fitted to the validations of the first half of
the planned steps, at the last planned step. Later validations are never read for it. ``results/benchmarks/forecast.md``
has what came of it on runs and studies in ``results/``, which are all of the lab.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.errors import InputError
from core.tracking.confidence_intervals import Estimate, wilson
from results.reporting.pages import Block, Heading, Table, Text, markdown, without_constants
from results.reporting.run_reader import Point, RecordedRun, load_run
from results.reporting.scaling import SigmoidFit, fit_sigmoid
from results.reporting.x_axis import totals

MEASURED = Path(__file__).resolve().parents[1] / "benchmarks" / "forecast.json"
COMMAND = "python -m results.forecast --measure"


@dataclass(frozen=True)
class Forecast:
    """``expected`` is of the last planned step; ``ended`` is what was measured there, None: it is not there yet."""

    run: str
    source: str
    last_step: int
    points: int  # validations of the first half after the start
    half: float  # the last of them
    expected: Estimate
    ended: float | None


@dataclass(frozen=True)
class Measured:
    """What forecasts of one kind of runs came to: a row of ``forecast.md``."""

    of: str
    forecasts: int
    median_error: float | None
    naive_error: float | None  # of taking the last validation of the first half for the end
    covered: int
    refused: Mapping[str, int]


def forecast_curve(
    run: str, source: str, curve: Sequence[tuple[float, float]], total: int, questions: int | None = None
) -> Forecast:
    """Forecast the end of a curve of (step, accuracy) from its points up to half of ``total`` steps.

    Raises:
        InputError: these points are too few, begin at the ceiling, or do not rise.
    """
    start = next((value for step, value in curve if step == 0), None)
    half = [(step, value) for step, value in curve if 0 < step <= total / 2]
    try:
        fit = fit_sigmoid([step for step, _ in half], [value for _, value in half], start, questions)
    except InputError as error:
        raise InputError(
            f"{run}, {source}: no forecast from its first {total // 2} of {total} steps: {error}"
        ) from None
    ended = next((value for step, value in curve if step == total), None)
    return Forecast(run, source, total, len(half), half[-1][1], fit.at(total), ended)


def accuracies(run: RecordedRun) -> dict[str, list[Point]]:
    """Return ``data_source -> validations`` of the mean accuracy; {} without a validation."""
    means = {source: [p for p in points if p.name.startswith("mean@")] for source, points in run.points().items()}
    return {source: points for source, points in means.items() if points}


def forecast_run(run: RecordedRun) -> list[Forecast]:
    """Return a forecast for each data source, of the run's last planned step.

    Raises:
        InputError: the run has no validation, or a source that cannot be forecast.
    """
    found, total = accuracies(run), run.manifest.get("total_steps") or run.last_step
    if not found:
        raise InputError(f"{run.name}: no validation was recorded; set trainer.test_freq for the next run")
    return [
        forecast_curve(
            run.name, source, [(p.step, p.estimate.value) for p in points], int(total), points[0].estimate.n or None
        )
        for source, points in found.items()
    ]


def said(one: Forecast) -> str:
    """Return a forecast as a sentence, and what became of it where the run is over."""
    low, value, high = (100 * x for x in (one.expected.low, one.expected.value, one.expected.high))
    text = (
        f"{one.run}, {one.source}: {value:.1f} [{low:.1f}, {high:.1f}] % at step {one.last_step} "
        f"(90 % interval), from {one.points} validations of its first half, the last of {100 * one.half:.1f} %"
    )
    return text if one.ended is None else f"{text}; it ended at {100 * one.ended:.1f} %"


# --- how good forecasts are ---


def published(results: Path) -> Iterator[tuple[str, Forecast | InputError]]:
    """Yield (kind, forecast or why there is none) of every published run and of every record of a study."""
    for path in sorted(results.glob("*/*/metrics.csv")):
        run = load_run(path.parent)
        for source, points in accuracies(run).items():
            curve = [(p.step, p.estimate.value) for p in points]
            yield "runs", _tried(run.name, source, curve, run.last_step, points[0].estimate.n or None)
    for folder in sorted(path for path in results.glob("*/study*") if path.is_dir()):
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            if curve := [tuple(point) for point in record.get("curve") or ()]:
                name = f"{folder.parent.name}/{folder.name}"
                yield f"study {name}", _tried(f"{name}/{path.stem}", "accuracy", curve, int(curve[-1][0]), None)


def _tried(
    run: str, source: str, curve: Sequence[tuple[float, float]], total: int, questions: int | None
) -> Forecast | InputError:
    try:
        return forecast_curve(run, source, curve, total, questions)
    except InputError as error:
        return error


def measure(results: Path) -> tuple[list[Measured], list[Forecast]]:
    """Return what the forecasts of the published runs came to, by kind and of all, and each of them."""
    tried = list(published(results))
    kinds = [*dict.fromkeys(kind for kind, _ in tried), "all"]
    rows = [_measured(kind, [one for of, one in tried if kind in (of, "all")]) for kind in kinds]
    return rows, [one for _, one in tried if isinstance(one, Forecast)]


_REASONS = {"too few": "too few validations", "already": "began at the ceiling", "did not rise": "did not rise"}


def _measured(kind: str, tried: Sequence[Forecast | InputError]) -> Measured:
    made = [one for one in tried if isinstance(one, Forecast)]
    refused = [str(one) for one in tried if isinstance(one, InputError)]
    reasons = Counter(next(short for told, short in _REASONS.items() if told in one) for one in refused)
    covered = sum(one.expected.low <= one.ended <= one.expected.high for one in made)
    errors = [
        statistics.median(abs(value - one.ended) for one, value in zip(made, values, strict=True)) if made else None
        for values in ([one.expected.value for one in made], [one.half for one in made])
    ]
    return Measured(kind, len(made), *errors, covered, dict(reasons))


def write_measured(results: Path) -> Path:
    """Write ``benchmarks/forecast.json`` and ``forecast.md`` from what is published; return the second."""
    rows, made = measure(results)
    path = results / "benchmarks" / "forecast.json"
    stored = {"measured": [asdict(row) for row in rows], "forecasts": [asdict(one) for one in made]}
    path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    page.write_text(markdown("Forecasts from the first half of a run", list(_report(rows, made))), encoding="utf-8")
    return page


def accuracy_of_forecasts(path: Path = MEASURED) -> str:
    """Return the sentence that stands beside every forecast: how good forecasts were, from the stored measurement."""
    if not path.exists():
        return f"how good such forecasts are was not measured: {COMMAND}"
    rows = {row["of"]: row for row in json.loads(path.read_text(encoding="utf-8"))["measured"]}
    return " ".join(_sentence(rows[kind]) for kind in ("runs", "all") if rows.get(kind, {}).get("forecasts"))


def _sentence(row: Mapping[str, Any]) -> str:
    what = "with the studies' runs" if row["of"] == "all" else "forecasts of published lab runs"
    return (
        f"Of {row['forecasts']} {what}, {row['covered']} ended inside the interval; the median error was "
        f"{100 * row['median_error']:.1f} points, and {100 * row['naive_error']:.1f} where the last validation of the "
        "first half is taken for the end."
    )


def _report(rows: Sequence[Measured], made: Sequence[Forecast]) -> Iterator[Block]:
    yield Text(
        f"Generated by `{COMMAND}`; not edited by hand. Each run's validations up to half of its steps are fitted with "
        "the sigmoid of `results/reporting/scaling.py`, and its last validation is forecast. Errors are in points of "
        "accuracy. *Last value kept* takes the last validation of the first half for the end. Runs of one task and one "
        "study resemble one another, so these are fewer independent cases than rows, and all are of the lab: they "
        "show nothing about large models."
    )
    header = ["of", "forecasts", "median error", "last value kept", "inside the 90 % interval", "not forecast"]
    yield Table(header, [_row(row) for row in rows])
    yield Heading("Each forecast")
    columns = [
        "run",
        "evaluated on",
        "validations used",
        "last of them",
        "forecast, 90 % interval",
        "ended at",
        "inside",
    ]
    yield Table(columns, [_line(one) for one in made])


def _row(row: Measured) -> list[str]:
    if not row.forecasts:
        numbers = ["", "", ""]
    else:
        low, high = wilson(row.covered / row.forecasts, row.forecasts)
        share = f"{row.covered} = {row.covered / row.forecasts:.0%} [{low:.0%}, {high:.0%}]"
        numbers = [f"{100 * row.median_error:.1f}", f"{100 * row.naive_error:.1f}", share]
    refused = "; ".join(f"{count}: {reason}" for reason, count in sorted(row.refused.items()))
    return [row.of, str(row.forecasts), *numbers, refused]


def _line(one: Forecast) -> list[str]:
    low, value, high = (100 * x for x in (one.expected.low, one.expected.value, one.expected.high))
    inside = one.expected.low <= one.ended <= one.expected.high
    expected = f"{value:.1f} [{low:.1f}, {high:.1f}]"
    used = [str(one.points), f"{100 * one.half:.1f}", expected, f"{100 * one.ended:.1f}", "yes" if inside else "no"]
    return [one.run, one.source, *used]


# --- the fit of whole runs, for reports ---


def fits(runs: Sequence[RecordedRun]) -> Iterator[Block]:
    """Yield the sigmoid of each run's whole curve: asymptote, midpoint by every axis, exponent; or why it has none."""
    rows = [row for run in runs for source, points in accuracies(run).items() for row in [_fitted(run, source, points)]]
    if not rows:
        return
    yield Heading("Where the curves level off")
    midpoints = [f"midpoint, {unit}" for unit in _UNITS.values()]
    yield without_constants(Table(["run", "evaluated on", "asymptote, %", *midpoints, "exponent", "why none"], rows))
    yield Text(
        "`R0 + (A - R0) / (1 + (M / C)^B)` (arXiv:2510.13786) fitted to the validations, R0 the one at step 0, C what "
        "was spent: asymptote A, midpoint M, exponent B, medians with 90 % intervals. Where M lies before the first "
        "validation, M and B are guesses. `python -m results.forecast RUN` forecasts the end from the first half."
    )


def curve_fits(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Table:
    """Return the sigmoid of each named curve of (step, accuracy), or why it has none; the questions are not known."""
    rows = []
    for name, curve in curves.items():
        start = next((value for step, value in curve if step == 0), None)
        later = [(step, value) for step, value in curve if step > 0]
        try:
            fit = fit_sigmoid([step for step, _ in later], [value for _, value in later], start)
        except InputError as error:
            rows.append([name, "", "", "", str(error)])
        else:
            rows.append([name, _in_percent(fit.asymptote), _bounded(fit.midpoint), _bounded(fit.exponent), ""])
    return without_constants(Table(["curve", "asymptote, %", "midpoint, steps", "exponent", "why none"], rows))


_UNITS = {"step": "steps", "tokens": "tokens", "hours": "hours"}


def _fitted(run: RecordedRun, source: str, points: Sequence[Point]) -> list[str]:
    start = next((p.estimate.value for p in points if p.step == 0), None)
    values, steps = [p.estimate.value for p in points if p.step > 0], [p.step for p in points if p.step > 0]
    found: dict[str, SigmoidFit] = {}
    try:
        for axis in _UNITS:
            spent = {step: step for step in steps} if axis == "step" else totals(run.metrics, run.config, axis)
            if all(spent.get(step, 0) > 0 for step in steps):
                found[axis] = fit_sigmoid([spent[step] for step in steps], values, start, points[0].estimate.n or None)
    except InputError as error:
        return [run.name, source, *[""] * (2 + len(_UNITS)), str(error)]
    by_step = found["step"]
    midpoints = [_bounded(found[axis].midpoint) if axis in found else "not recorded" for axis in _UNITS]
    return [run.name, source, _in_percent(by_step.asymptote), *midpoints, _bounded(by_step.exponent), ""]


def _in_percent(one: Estimate) -> str:
    return _bounded(Estimate(100 * one.value, 100 * one.low, 100 * one.high, one.n))


def _bounded(one: Estimate) -> str:
    return f"{_short(one.value)} [{_short(one.low)}, {_short(one.high)}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
