"""The sigmoid of :mod:`results.reporting.scaling` fitted to the validations of runs: where their curves level off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from core.errors import InputError
from core.tracking.confidence_intervals import Estimate
from results.reporting.pages import Block, Heading, Table, Text, without_constants
from results.reporting.run_reader import Point, RecordedRun
from results.reporting.scaling import SigmoidFit, fit_sigmoid
from results.reporting.x_axis import totals


def accuracies(run: RecordedRun) -> dict[str, list[Point]]:
    """Return ``data_source -> validations`` of the mean accuracy; {} without a validation."""
    means = {source: [p for p in points if p.name.startswith("mean@")] for source, points in run.points().items()}
    return {source: points for source, points in means.items() if points}


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
        "validation, M and B are guesses."
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
