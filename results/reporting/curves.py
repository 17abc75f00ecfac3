"""The curves of a report: which metrics are drawn, and how several seeds become one curve.

How a curve looks is decided in :mod:`results.reporting.pages`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from core.tracking.metrics import PARTS, REST, time_parts
from results.reporting.pages import Block, Curves, Gallery, Heading, Line, Text, draw
from results.reporting.run_reader import RecordedRun
from results.reporting.summaries import group_name

Group = list[RecordedRun]
SMOOTHED_BEYOND = 60  # steps

# title, {metric: its label}, note
PANELS = (
    (
        "Reward",
        {"critic/rewards/mean": "trained on", "critic/score/mean": "scorer's"},
        "mean over the step's samples",
    ),
    ("Accuracy on training prompts", {"reward/acc/mean": ""}, ""),
    ("Response length", {"response_length/mean": ""}, "tokens"),
    ("Truncated responses", {"response_length/clip_ratio": ""}, "share"),
    ("Negative log-likelihood of demonstrations", {"actor/nll": ""}, "nats a token"),
    ("Entropy", {"actor/entropy": ""}, "nats a token"),
    (
        "Clip fractions",
        {
            "actor/pg_clipfrac": "policy",
            "actor/pg_clipfrac_lower": "dual clip",
            "critic/vf_clipfrac": "value",
        },
        "share of tokens",
    ),
    (
        "Gradient norm",
        {"actor/grad_norm": "policy", "critic/grad_norm": "critic"},
        "before clipping",
    ),
    (
        "KL",
        {
            "actor/ppo_kl": "to the old policy",
            "actor/kl_loss": "to the reference",
            "actor/reward_kl_penalty": "in reward",
        },
        "nats a token",
    ),
    ("Explained variance of the critic", {"critic/vf_explained_var": ""}, ""),
    (
        "Engine against learner",
        {"rollout_corr/logp_diff_mean": "mean", "rollout_corr/logp_diff_max": "largest"},
        "|log-prob|",
    ),
    ("Groups kept", {"collect/keep_rate": ""}, "share of prompts drawn"),
)


# Beginnings of metrics that every recipe has, or that say nothing of what is learnt
COMMON = (
    "timing_s/",
    "perf/",
    "val-",
    "training/",
    "health/",
    "collect/",
    "rollout_corr/",
    "critic/",
    "actor/",
    "response_length/",
    "prompt_length/",
    "num_turns/",
    "retrieval/",
)
COMMON_REWARDS = ("acc/mean", "score/mean", "masked_share", "zero_variance_share")
OWN_METRICS = 8  # panels of them at most

# --- panels ---


def own_metrics(groups: Sequence[Group]) -> list[str]:
    """Return the metrics of a scorer, a hook or a recipe of one's own, which change in some run."""
    found = set()
    for run in (run for group in groups for run in group):
        for name in {name for row in run.metrics for name in row} - {"step"}:
            ending = name.removeprefix("reward/")
            is_common = name.startswith(COMMON) or ending in COMMON_REWARDS
            if not (is_common or ending.endswith("_rate")) and len(set(run.series(name)[1])) > 1:
                found.add(name)
    return sorted(found)[:OWN_METRICS]


def panels(groups: Sequence[Group]) -> list[Curves]:
    """Return the panels that have data, the accuracy first."""
    found = [_accuracy_panel(groups), _reward_panel(groups)]
    found += [_metric_panel(groups, *panel) for panel in PANELS]
    found += [_metric_panel(groups, name, {name: ""}, "") for name in own_metrics(groups)]
    found += [_phase_panel(groups, group) for group in groups]
    return [panel for panel in found if panel]


def curves(shown: Sequence[Curves]) -> Iterator[Block]:
    """Yield the heading, a note on how to read the curves, the panels, and the values that never
    change."""
    yield Heading("Curves")
    yield Text(
        "A faint line is one seed, or the single steps; the strong line over it is the mean over "
        "seeds and, in curves "
        f"of more than {SMOOTHED_BEYOND} steps, over neighbouring steps. Bands are 95 % intervals "
        f"over questions."
    )
    flat = {panel.title: one for panel in shown if (one := _constant(panel)) is not None}
    yield Gallery([panel for panel in shown if panel.title not in flat])
    if flat:
        yield Text(
            f"The same at every step: "
            f"{', '.join(f'{title} {one:.4g}' for title, one in flat.items())}."
        )


def _constant(panel: Curves) -> float | None:
    """Return the only value of a panel with several steps, which is no picture, or None."""
    values = {value for line in panel.lines for value in line.values}
    several = any(len(line.steps) > 1 for line in panel.lines)
    return values.pop() if several and len(values) == 1 and not panel.stacked else None


def _mean_line(lines: Sequence[Line]) -> Line:
    """Return the mean of several seeds at the steps that all of them have."""
    shared = sorted(set.intersection(*(set(line.steps) for line in lines)))
    tables = [dict(zip(line.steps, line.values, strict=True)) for line in lines]
    values = [statistics.fmean(table[step] for table in tables) for step in shared]
    return Line(lines[0].label, shared, values, lines[0].group, lines[0].variant)


def _running_mean(line: Line) -> Line:
    """Return the mean over a thirtieth of the curve around each step."""
    reach = max(1, len(line.steps) // 60)
    values = [
        statistics.fmean(line.values[max(0, i - reach) : i + reach + 1])
        for i in range(len(line.values))
    ]
    return replace(line, values=values)


def _with_mean(lines: Sequence[Line]) -> list[Line]:
    """Return a short single line as it is; several seeds, or a long curve, faint under their
    mean."""
    lines = [line for line in lines if line.steps]
    long = any(len(line.steps) > SMOOTHED_BEYOND for line in lines)
    if not lines or (len(lines) == 1 and not long):
        return lines
    mean = _mean_line(lines)
    return [
        *(replace(line, label="", faint=True) for line in lines),
        _running_mean(mean) if long else mean,
    ]


def _label(groups: Sequence[Group], group: Group, part: str) -> str:
    name = group_name([run.name for run in group]) if len(groups) > 1 else ""
    return ", ".join(word for word in (name, part) if word)


def _metric_panel(
    groups: Sequence[Group], title: str, metrics: Mapping[str, str], note: str
) -> Curves | None:
    present = {
        m: part for m, part in metrics.items() if any(run.series(m)[0] for g in groups for run in g)
    }
    if len(metrics) > len(present) == 1:  # which of them it is: no legend has a single line
        note = ", ".join(filter(None, (*present.values(), note)))
    if title == "Reward" and len(present) == 2:
        reward, score = metrics
        if all(run.series(reward) == run.series(score) for group in groups for run in group):
            del present[score]
    lines: list[Line] = []
    for at, group in enumerate(groups):
        for variant, (metric, part) in enumerate(present.items()):
            label = _label(groups, group, part if len(present) > 1 else "")
            same = [Line(label, *run.series(metric), at, variant) for run in group]
            lines += _with_mean(same)
    return Curves(title, lines, note=note) if lines else None


def _validated_lines(groups: Sequence[Group], sources: Sequence[str], variable: str) -> list[Line]:
    lines: list[Line] = []
    for at, group in enumerate(groups):
        for variant, source in enumerate(sources):
            label = _label(groups, group, source if len(sources) > 1 else "")
            same = [
                _accuracy_line(run, source, label, at, variant, len(group) == 1, variable)
                for run in group
            ]
            lines += _with_mean(same)
    return lines


def _reward_panel(groups: Sequence[Group]) -> Curves | None:
    """Return the rewards of validation answers, where they say more than accuracies."""
    dense = {source for group in groups for run in group for source in run.dense}
    lines = _validated_lines(groups, sorted(dense), "reward")
    return Curves("Validation reward", lines, note="held-out, the scorer's") if lines else None


def _accuracy_panel(groups: Sequence[Group]) -> Curves | None:
    sources = list(
        dict.fromkeys(source for group in groups for run in group for source in run.points())
    )
    lines = _validated_lines(groups, sources, "acc")
    note = (
        "held-out, 95 % interval"
        if all(len(g) == 1 for g in groups)
        else ("held-out, mean over seeds")
    )
    scored = any(source in run.scored for group in groups for run in group for source in sources)
    if scored:
        return Curves("Validation score", lines, note=note) if lines else None
    return (
        Curves("Validation accuracy", [_percent(line) for line in lines], note=f"%, {note}")
        if lines
        else None
    )


def _percent(line: Line) -> Line:
    low, high = (
        [100 * one for one in each] if each is not None else None for each in (line.low, line.high)
    )
    return replace(line, values=[100 * value for value in line.values], low=low, high=high)


def _accuracy_line(
    run: RecordedRun,
    source: str,
    label: str,
    group: int,
    variant: int,
    interval: bool,
    variable: str = "acc",
) -> Line:
    points = [p for p in run.points(variable).get(source, []) if p.name.startswith("mean@")]
    estimates = [p.estimate for p in points]
    bounded = interval and all(e.low is not None for e in estimates)
    low, high = (
        ([e.low for e in estimates], [e.high for e in estimates]) if bounded else (None, None)
    )
    return Line(
        label,
        [p.step for p in points],
        [e.value for e in estimates],
        group,
        variant,
        low=low,
        high=high,
    )


def _phase_panel(groups: Sequence[Group], group: Group) -> Curves | None:
    """Return mean seconds of each part of a step over the seeds, for the steps that all of them
    have."""
    rows = [
        {row["step"]: found for row in run.metrics if (found := time_parts(row))} for run in group
    ]
    steps = sorted(set.intersection(*(set(table) for table in rows)))
    names = dict.fromkeys(name for table in rows for found in table.values() for name in found)
    if not steps or list(names) == [REST]:
        return None
    seconds = {
        n: [statistics.fmean(table[step].get(n, 0.0) for table in rows) for step in steps]
        for n in names
    }
    whole = sum(map(sum, seconds.values()))
    largest = sorted(seconds, key=lambda name: -sum(seconds[name]))
    note = " ".join(
        ["seconds a step", _label(groups, group, "") and f"({_label(groups, group, '')})"]
    ).strip()
    colours = [*PARTS, REST]  # a phase has one colour in every chart
    kept = [name for name in largest if sum(seconds[name]) > 0.005 * whole]
    shown = [Line(name, steps, seconds[name], colours.index(name)) for name in kept]
    return Curves("Time by phase", shown, stacked=True, note=note) if len(shown) > 1 else None


# --- the picture of the README ---


def learning_curve(groups: Sequence[Group]) -> str:
    """Return an SVG file of held-out accuracy by step: a faint line a seed, a strong one for their
    mean."""
    lines: list[Line] = []
    for at, group in enumerate(groups):
        seeds = [_accuracies(run) for run in group]
        steps = sorted(set.intersection(*map(set, seeds)))
        lines += [Line("", steps, [seed[step] for step in steps], at, faint=True) for seed in seeds]
        mean = [statistics.fmean(seed[step] for seed in seeds) for step in steps]
        lines.append(Line(group_name([run.name for run in group]), steps, mean, at))
    title = "Held-out accuracy in percent by step: one faint line a seed, a strong one for the mean"
    svg, _ = draw(Curves(title, [_percent(line) for line in lines]), 0, ground="white")
    end = svg.index(">") + 1
    # Legible on a dark page too
    return f'{svg[:end]}<rect width="100%" height="100%" fill="#ffffff"/>{svg[end:]}\n'


def _accuracies(run: RecordedRun) -> dict[float, float]:
    """Return step -> mean@k of the run's last data source, which is the hardest one of the labs."""
    points = next(reversed(run.points().values()))
    return {point.step: point.estimate.value for point in points if point.name.startswith("mean@")}
