"""The picture near the top of the README: held-out accuracy by step of the experiments with several seeds, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from results.reporting.curves import Group
from results.reporting.pages import Curves, Line, draw
from results.reporting.run_reader import RecordedRun, group_name

PAPER = '<rect width="100%" height="100%" fill="#ffffff"/>'  # legible on a dark page too


def learning_curve(groups: Sequence[Group]) -> str:
    """Return a whole SVG file: a faint line a seed, a strong one for their mean."""
    lines: list[Line] = []
    for at, group in enumerate(groups):
        name, seeds = group_name([run.name for run in group]), [accuracies(run) for run in group]
        shared = sorted(set.intersection(*map(set, seeds)))
        lines += [Line("", shared, [seed[step] for step in shared], at, faint=True) for seed in seeds]
        lines.append(Line(name, shared, [sum(seed[step] for seed in seeds) / len(seeds) for step in shared], at))
    title = "Held-out accuracy by step: one faint line a seed, a strong one for the mean"
    svg, _ = draw(Curves(title, lines), 0, ground="white")
    end = svg.index(">") + 1
    return f"{svg[:end]}{PAPER}{svg[end:]}\n"


def accuracies(run: RecordedRun) -> dict[float, float]:
    """Return step -> mean@k of the run's last data source, which is the hardest one of the labs."""
    points = next(reversed(run.points().values()))
    return {point.step: point.estimate.value for point in points if point.name.startswith("mean@")}
