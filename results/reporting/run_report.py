"""The report of recorded runs: what was learnt, curves, step times, comparison, samples,
configuration, provenance.

It is a list of blocks (:mod:`results.reporting.pages`), written as Markdown and as one web page; a
finished lab run prints the shortest form of it in its terminal. The command is
``results/report.py``; the tables over all published runs are in
:mod:`results.reporting.readme_tables`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import printable
from core.tracking.metrics import PARTS, REST, time_parts
from core.tracking.tracker import spread_out
from results.reporting.comparison import seed_interval
from results.reporting.comparison_report import (
    comparison,
    flipped_in_run,
    shortened,
    verdicts,
    with_baseline,
)
from results.reporting.curves import Group, curves, panels
from results.reporting.numbers import score
from results.reporting.pages import (
    Block,
    Curves,
    Fold,
    Gallery,
    Heading,
    Table,
    Text,
    sparkline,
    without_constants,
    write_pages,
)
from results.reporting.readme_tables import experiment_table, experiments, run_table
from results.reporting.run_reader import NOT_RECORDED, RecordedRun
from results.reporting.summaries import comparable, group_name, group_runs, hardware_of

# Of the first table
FIRST = ("experiment", "evaluated on", "metric", "questions", "seeds", "before", "after", "steps")
WIDTH = 100  # characters of a question or an answer in a terminal
SHOWN_SAMPLES = 8  # of a run; the questions that flipped are listed apart


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


# --- what was learnt ---


def headline(runs: Sequence[RecordedRun]) -> str:
    """Return a line for each experiment and data source: accuracy before and after, interval,
    questions; and another of its rewards where they say more."""
    found = experiments(_in_one_unit(runs))
    lines = [experiment.sentence for experiment in found if experiment.metric.startswith("mean@")]
    lines += [line for group in group_runs(runs) for line in _validation_rewards(group)]
    return "\n".join(
        lines or ["no validation was recorded", *filter(None, map(_training_rewards, runs))]
    )


def _validation_rewards(group: Group) -> Iterator[str]:
    """Yield a line for each data source whose rewards are not its accuracies."""
    for source in sorted(frozenset().union(*(run.dense for run in group))):
        series = [run.points("reward").get(source, []) for run in group]
        if not all(series):
            continue
        ends = [[points[at].estimate for points in series] for at in (0, -1)]
        before, after = (
            score(seed_interval([each.value for each in estimates], estimates))
            if len(estimates) > 1
            else score(estimates[0])
            for estimates in ends
        )
        start = f"{before} → " if any(len(points) > 1 for points in series) else ""
        name = group_name([run.name for run in group])
        yield f"{name}: reward on {source} {start}{after} (step {series[0][-1].step})"


def _in_one_unit(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the runs' summaries: what is a score in one run stands beside no percentage of
    another."""
    scored = sorted(frozenset().union(*(run.scored for run in runs)))
    return [{**comparable(run), "scored": scored} for run in runs]


def _training_rewards(run: RecordedRun) -> str:
    """Return what a run shows without validation: the mean training reward of its first and last
    fifth of steps."""
    steps, rewards = run.series("critic/rewards/mean")
    # Not a fifth of the rows: a published copy lacks some
    some = int(steps[-1]) // 5 if steps else 0
    first = [reward for step, reward in zip(steps, rewards, strict=True) if step <= some]
    last = [reward for step, reward in zip(steps, rewards, strict=True) if step > steps[-1] - some]
    if not first:
        return ""
    noun = f"{some} step{'s' * (some > 1)}"
    mean_first, mean_last = statistics.fmean(first), statistics.fmean(last)
    return (
        f"{run.name}: mean reward of training answers {mean_first:.3f} in the first {noun}, "
        f"{mean_last:.3f} in the last {noun}"
    )


def learnt(
    runs: Sequence[RecordedRun], picture: Sequence[Curves], links: Sequence[Block]
) -> Iterator[Block]:
    """Yield what is looked at first: a sentence an experiment, one picture, one table; the rest of
    it is folded."""
    summaries = _in_one_unit(runs)
    whole = experiment_table(summaries)
    first = [whole.header.index(name) for name in FIRST]
    short = Table(
        [whole.header[at] for at in first], [[row[at] for at in first] for row in whole.rows]
    )
    yield Text(headline(runs), strong=True)
    if picture:
        yield Gallery(picture)
    if short.rows:
        yield without_constants(short)
    yield from links
    if short.rows:
        yield Text(_how_to_read(runs))
    tables = [table for table in (whole, run_table(summaries)) if table.rows]
    yield Fold("Settings, and each run", [without_constants(table) for table in tables])


def _how_to_read(runs: Sequence[RecordedRun]) -> str:
    note = (
        "Accuracy in percent at the last validation, with 95 % intervals: of one run over "
        "questions, of several seeds "
        "after their standard deviation (±) over seeds."
    )
    if scored := sorted(frozenset().union(*(run.scored for run in runs))):
        note += (
            f" On {', '.join(scored)} the scorer gives more than right and wrong: these are "
            f"mean scores."
        )
    return note


# --- times ---


def step_times(groups: Sequence[Group]) -> Iterator[Block]:
    """Yield a table of the seconds of a step by part, which add up; the mean over the steps of all
    seeds."""
    columns = []
    for group in groups:
        lines = [found for run in group for row in run.metrics if (found := time_parts(row))]
        names = [*PARTS, REST]
        columns.append(
            {n: statistics.fmean(f.get(n, 0.0) for f in lines) for n in names} if lines else {}
        )
    if not any(columns):
        return
    rows = [
        [name, *(_seconds(column, name) for column in columns)]
        for name in (*PARTS, REST)
        if any(column.get(name) for column in columns)
    ]
    total = [f"{sum(column.values()):.3f}" if column else "" for column in columns]
    yield Heading("Where a step's time goes")
    yield Table(
        ["seconds a step", *(group_name([run.name for run in g]) for g in groups)],
        [*rows, ["all", *total]],
    )
    yield Text(
        "Means over steps and seeds. Scoring that decoding hides is in decode, and samples of the "
        "next step that the "
        "update hides are nowhere: each second is counted once. A checkpoint counts in the step "
        "after it."
    )


def _seconds(column: Mapping[str, float], name: str) -> str:
    whole = sum(column.values())
    return f"{column[name]:.3f} ({column[name] / whole:.0%})" if whole else ""


# --- samples, configuration, provenance ---


def config_difference(groups: Sequence[Group]) -> Table:
    """Return the keys in which the experiments' configurations differ, seeds and names of runs left
    out."""
    first = [group[0] for group in groups]
    keys = sorted({key for run in first for key in run.config})
    rows = [[key, *(_yaml(run.config.get(key, "absent")) for run in first)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table(["key", *(group_name([run.name for run in group]) for group in groups)], rows)


def samples(run: RecordedRun) -> Iterator[Block]:
    """Yield some questions before and after, of those that both validations kept."""
    steps = sorted({row["step"] for row in run.samples})
    if not steps:
        return
    first, last = (
        {_sample_key(r): r for r in run.samples if r["step"] == step}
        for step in (steps[0], steps[-1])
    )
    chosen = spread_out([key for key in last if key in first], SHOWN_SAMPLES)
    rows = [
        [
            str(last[key]["input"])[-600:],
            shortened(_cell(last[key].get("gts"))),
            _answer(first[key]),
            _answer(last[key]),
        ]
        for key in chosen
    ]
    yield Heading(f"Samples of {run.name}")
    if len(steps) == 1:
        header, rows = ["question", "expected", f"step {steps[0]}"], [row[:3] for row in rows]
    else:
        header = ["question", "expected", f"step {steps[0]}", f"step {steps[-1]}"]
    yield Table(header, rows, prose=True)


def _sample_key(row: Mapping[str, Any]) -> Any:
    return row.get("uid", row["input"])


def _answer(row: Mapping[str, Any]) -> str:
    text = str(row["output"])
    return (
        f"{text if len(text) <= 1500 else text[:700] + ' […] ' + text[-700:]}\n(score "
        f"{row['score']:g})"
    )


def configuration(groups: Sequence[Group]) -> Iterator[Block]:
    yield Heading("Configuration")
    if len(groups) > 1:
        yield Heading("Where the runs differ", 3)
        yield config_difference(groups)
    run = groups[0][0]
    changed = run.manifest.get("changed_from_defaults", {})
    yield Heading(f"Where {run.name} differs from the defaults", 3)
    rows = [[key, *map(_yaml, pair)] for key, pair in sorted(changed.items())]
    yield Table(["key", "default", "here"], rows) if rows else Text("Nowhere.")
    yield Fold(
        "All keys",
        [Table(["key", "value"], [[key, _yaml(value)] for key, value in run.config.items()])],
    )


def provenance(groups: Sequence[Group]) -> Iterator[Block]:
    runs = [run for group in groups for run in group]
    yield Heading("Provenance")
    yield _by_run(
        runs, {title: [_cell(read(run)) for run in runs] for title, read in _PROVENANCE.items()}
    )
    packages = sorted({name for run in runs for name in run.session["packages"]})
    versions = {name: [run.session["packages"].get(name, "") for run in runs] for name in packages}
    yield Fold("Package versions", [_by_run(runs, versions)])


def _by_run(runs: Sequence[RecordedRun], facts: Mapping[str, Sequence[str]]) -> Table:
    """Return a line for each fact of one run, or for each of several runs, with what they share in
    the caption."""
    facts = {name: cells for name, cells in facts.items() if any(cells)}
    if len(runs) == 1:
        return Table(["", runs[0].name], [[name, *cells] for name, cells in facts.items()])
    rows = [list(cells) for cells in zip([run.name for run in runs], *facts.values(), strict=True)]
    return without_constants(Table(["run", *facts], rows))


def _git(run: RecordedRun) -> str:
    git = run.session["git"]
    if not git["commit"]:
        return "not a git checkout"
    return git["commit"][:12] + (
        f", uncommitted changes {git['diff_sha256'][:12]}" if git["dirty"] else ""
    )


def _resumes(run: RecordedRun) -> str:
    steps = [
        s["resumed_from_step"]
        for s in run.manifest["sessions"]
        if s["resumed_from_step"] is not None
    ]
    gaps = [s["gap"] for s in run.manifest["sessions"] if "gap" in s]
    return "; ".join([*(f"resumed after step {step}" for step in steps), *gaps])


_PROVENANCE = {
    "status": lambda run: run.status,
    "last healthy step": lambda run: run.manifest.get("last_healthy_step"),
    "stopped because": lambda run: run.manifest.get("stopped_because"),
    "command": lambda run: run.session["command"],
    "commit": _git,
    "started": lambda run: run.manifest["sessions"][0]["started"],
    "ended": lambda run: run.session["ended"],
    "interruptions": _resumes,
    "seconds in steps": lambda run: f"{run.seconds:.0f}",
    "hardware": lambda run: hardware_of(run.session),
    "threads": lambda run: ", ".join(
        f"{k} {v}" for k, v in run.session["threads"].items() if v is not None
    ),
    "seeds": lambda run: ", ".join(f"{k}={v}" for k, v in run.manifest["seeds"].items()),
    "base weights": lambda run: run.base[:12] if run.base else NOT_RECORDED,
    "data": lambda run: "; ".join(
        f"{Path(d['path']).name} {d['sha256'][:12]}" for d in run.manifest["data"]
    ),
}


# --- the page ---


def page(
    runs: Sequence[RecordedRun], baseline: str | None = None, links: Sequence[Block] = ()
) -> tuple[str, list[Block]]:
    """Return title and blocks of the report, compared with ``baseline``.

    Raises:
        InputError: no run has the baseline's name.
    """
    groups = with_baseline(group_runs(runs), baseline)
    drawn = panels(groups)
    blocks: list[Block] = (
        [Text("\n".join(lines), strong=True)] if (lines := verdicts(groups)) else []
    )
    blocks += [
        *learnt([run for group in groups for run in group], drawn[:1], links),
        *curves(drawn[1:]),
    ]
    blocks += step_times(groups)
    if len(groups) > 1:
        blocks += comparison(groups)
    for group in groups:
        blocks += samples(group[0])
    if len(groups) == 1:
        blocks += flipped_in_run(groups[0][0])
    blocks += [*configuration(groups), *provenance(groups)]
    return ", ".join(group_name([run.name for run in group]) for group in groups), blocks


def write_report(runs: Sequence[RecordedRun], out: Path, baseline: str | None = None) -> Path:
    """Write ``report.md`` and ``report.html`` into ``out`` and return the second; recorded tokens
    have a page too."""
    from results.reporting.trace_page import trace_links  # it loads numpy

    return write_pages(out, "report", *page(runs, baseline, trace_links(runs, out)))[1]


# --- in a terminal ---


def closing_lines(run: RecordedRun) -> list[str]:
    """Return a line for each data source's accuracy, and three of a question whose answer changed
    most."""
    return [printable(line) for line in (*_sparklines(run), *_most_changed(run))]


def _sparklines(run: RecordedRun) -> Iterator[str]:
    for source, points in run.points().items():
        means = [point for point in points if point.name.startswith("mean@")]
        if len(means) < 2:
            continue
        values = [point.estimate.value for point in means]
        steps = f"steps {means[0].step} to {means[-1].step}"
        what, form = ("score", ".3g") if source in run.scored else ("accuracy", ".1%")
        yield (
            f"{what} on {source}: {values[0]:{form}} {sparkline(values)} {values[-1]:{form}}, "
            f"validations at {steps}"
        )


def _most_changed(run: RecordedRun) -> Iterator[str]:
    """Yield the question whose score rose most between the first and the last validation that kept
    samples."""
    steps = sorted({row["step"] for row in run.samples})
    if len(steps) < 2:
        return
    first, last = (
        {_sample_key(r): r for r in run.samples if r["step"] == step}
        for step in (steps[0], steps[-1])
    )
    shared = [key for key in last if key in first]
    if not shared:
        return
    key = max(shared, key=lambda one: last[one]["score"] - first[one]["score"])
    yield (
        f"question: {_shortened(last[key]['input'])}   expected: "
        f"{_shortened(last[key].get('gts', ''))}"
    )
    for when, row in ((f"step {steps[0]}", first[key]), (f"step {steps[-1]}", last[key])):
        yield f"  {when:>8}: {_shortened(row['output'])}   score {row['score']:g}"


def _shortened(text: Any) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= WIDTH else f"{flat[: WIDTH // 2]} […] {flat[-WIDTH // 2 :]}"
