"""Pictures of pass@k: the share of questions of which at least one of k answers is right, over k.

A run can raise pass@1 and lower pass@k of a large k: it then finds less than the model that it started from. One number
does not show that, the curve does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.tracking.confidence_intervals import Estimate
from core.tracking.validation import ValRecord, merge_by_question, variable_estimates
from results.reporting.pages import Curves, Line
from results.reporting.run_reader import RecordedRun, group_name

Curve = Mapping[int, Estimate]  # k -> pass@k
AXIS = "answers a question, k"


def pass_at_k(records: Sequence[ValRecord]) -> dict[str, Curve]:
    """Return ``data_source -> k -> pass@k`` of validation records, for k of 1, the powers of two and all samples.

    Data sources with one answer a question, or with accuracies other than 0 and 1, have no curve.
    """
    found = {}
    for source, rows in merge_by_question(records).items():
        n = min(len(row.values["acc"]) for row in rows)
        sizes = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
        estimates = variable_estimates("acc", rows, n, sizes)
        if n > 1 and f"pass@{n}" in estimates:
            found[source] = {k: estimates[f"pass@{k}"] for k in sizes}
    return found


def pass_at_k_panels(named: Mapping[str, Mapping[str, Curve]]) -> list[Curves]:
    """Return a panel for each data source. ``named`` is label -> data source -> curve."""
    sources = dict.fromkeys(source for curves in named.values() for source in curves)
    return [
        Curves(
            f"pass@k on {source}",
            [_line(label, curves[source], at) for at, (label, curves) in enumerate(named.items()) if source in curves],
            note="95 % intervals over questions",
            x=AXIS,
        )
        for source in sources
    ]


def _line(label: str, curve: Curve, group: int) -> Line:
    estimates = list(curve.values())
    bounded = all(one.low is not None for one in estimates)
    low, high = ([e.low for e in estimates], [e.high for e in estimates]) if bounded else (None, None)
    return Line(label, list(curve), [one.value for one in estimates], group, low=low, high=high)


def run_panels(groups: Sequence[Sequence[RecordedRun]]) -> list[Curves]:
    """Return the panels of runs: each group's first seed at its first and at its last validation that was kept."""
    named: dict[str, Mapping[str, Curve]] = {}
    for group in groups:
        run = group[0]
        name = f"{group_name([run.name])}, " if len(groups) > 1 else ""
        seed = f", seed {run.seed}" if len(group) > 1 else ""
        steps = sorted(run.validation)
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            named[f"{name}step {step}{seed}"] = pass_at_k(run.validation[step])
    return pass_at_k_panels(named)
