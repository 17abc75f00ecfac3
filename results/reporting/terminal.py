"""What a finished run shows in a terminal: a sparkline of its accuracy, and a question answered before and after.

The page has the same in full (:mod:`results.reporting.run_report`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from core.errors import printable
from results.reporting.pages import sparkline
from results.reporting.run_reader import RecordedRun

WIDTH = 100  # characters of a question or an answer


def closing_lines(run: RecordedRun) -> list[str]:
    """Return a line for each data source's accuracy, and three of a question whose answer changed most."""
    return [printable(line) for line in (*_sparklines(run), *_before_and_after(run))]


def _sparklines(run: RecordedRun) -> Iterator[str]:
    for source, points in run.points().items():
        means = [point for point in points if point.name.startswith("mean@")]
        if len(means) < 2:
            continue
        values = [point.estimate.value for point in means]
        steps = f"steps {means[0].step} to {means[-1].step}"
        what, form = ("score", ".3g") if source in run.scored else ("accuracy", ".1%")
        yield f"{what} on {source}: {values[0]:{form}} {sparkline(values)} {values[-1]:{form}}, validations at {steps}"


def _before_and_after(run: RecordedRun) -> Iterator[str]:
    """Yield the question whose score rose most between the first and the last validation that kept samples."""
    steps = sorted({row["step"] for row in run.samples})
    if len(steps) < 2:
        return
    first, last = (
        {row.get("uid", row["input"]): row for row in run.samples if row["step"] == step}
        for step in (steps[0], steps[-1])
    )
    shared = [key for key in last if key in first]
    if not shared:
        return
    key = max(shared, key=lambda one: last[one]["score"] - first[one]["score"])
    yield f"question: {_shortened(last[key]['input'])}   expected: {_shortened(last[key].get('gts', ''))}"
    for when, row in ((f"step {steps[0]}", first[key]), (f"step {steps[-1]}", last[key])):
        yield f"  {when:>8}: {_answer(row)}"


def _answer(row: Mapping[str, Any]) -> str:
    return f"{_shortened(row['output'])}   score {row['score']:g}"


def _shortened(text: Any) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= WIDTH else f"{flat[: WIDTH // 2]} […] {flat[-WIDTH // 2 :]}"
