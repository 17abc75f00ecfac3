"""Tables of results: in a report, in ``results/README.md`` and in the top README, all made from run
summaries.

No number in them is typed: a test generates the two READMEs again from the committed folders and
compares.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.tracking.validation import Estimate
from results.reporting.commands import repeat
from results.reporting.comparison import Paired, seed_interval
from results.reporting.curves import learning_curve
from results.reporting.numbers import change, shown
from results.reporting.pages import Table, markdown_table, marks, sparkline, with_block
from results.reporting.run_reader import NOT_RECORDED, load_run, settings_of
from results.reporting.summaries import Summary, group_name, grouped_summaries, read_summaries
from results.tables import page

# How experiments are named that are not meant to learn the task
CONTROL = re.compile(r"-(blank|naive|random|shuffled)(-seed\d+)?$")
HEADLINE_SEEDS = 3  # fewer seeds give no interval worth a headline
FACTS = (
    "experiment",
    "estimator",
    "loss",
    "evaluated on",
    "metric",
    "questions",
    "seeds",
    "before",
    "after",
    "steps",
    "decoding",
    "model",
)
STATEMENTS = """A direction *holds* if the 95 % interval of the difference here is on the paper's \
side of 0, and *fails* on the other. Equality holds within the margin of its page, and fails \
outside it. All else is *not seen*. The page of each table has its runs, controls and command."""
HOW_TO_READ = """Percent at the last validation of a run, never at the best one. Square brackets \
hold 95 % intervals: over seeds (Student, after ± the standard deviation) where there are several, \
else over questions (Wilson). Where the interval over questions is the wider one it is taken, with \
the words "over questions". Minutes are those of a run's steps. A run's folder has its \
settings, machine, packages and commit; `python -m results.report` with the folder also prints the \
command with its keys."""
LINKS = """More: [the real model](real/instructions.md), [speed](benchmarks/), \
[GPU](gpu/README.md), [scorers](rewards/scorers.md), [conformance](conformance.md), \
[the notebook of what was tried](LOG.md). `python -m results.report results/<recipe>/<run> ...` \
writes curves and samples of runs, or compares them."""


@dataclass(frozen=True)
class Experiment:
    """One kind of accuracy on one data source, of the runs that differ in their seeds only."""

    runs: Sequence[Summary]
    results: Sequence[Mapping[str, Any]]  # one a run

    @property
    def name(self) -> str:
        return group_name([run["name"] for run in self.runs])

    @property
    def is_control(self) -> bool:
        return CONTROL.search(self.name) is not None

    @property
    def source(self) -> str:
        return self.results[0]["data_source"]

    @property
    def metric(self) -> str:
        return self.results[0]["metric"]

    @property
    def is_score(self) -> bool:
        return any(self.source in run.get("scored", ()) for run in self.runs)

    def values(self, when: str) -> list[float]:
        """Return the accuracies ``before`` or ``after``, one for each run."""
        return [result[when]["estimate"]["value"] for result in self.results if result[when]]

    def text(self, when: str) -> str:
        """Return the mean over several seeds, or one run's accuracy with its interval; '' if not
        measured."""
        if len(self.results) > 1:
            estimates = [Estimate(**each[when]["estimate"]) for each in self.results if each[when]]
            if len(estimates) < len(self.results):
                return ""
            over_seeds = seed_interval([each.value for each in estimates], estimates)
            return shown(over_seeds, self.is_score)
        return _point(self.results[0], when, self.is_score)

    @property
    def unfinished(self) -> list[str]:
        """How far the runs came that did not come to their end."""
        return sorted({run["status"] for run in self.runs} - {"finished"})

    @property
    def sentence(self) -> str:
        before = f"{self.text('before')} → " if self.text("before") else ""
        seeds = f", {len(self.runs)} seeds" if len(self.runs) > 1 else ""
        result = self.results[0]
        steps = "–".join(map(str, sorted({each["after"]["step"] for each in self.results})))
        details = [f"{self.metric}, {result['questions']} questions, step {steps}{seeds}"]
        details += self.unfinished
        if failed := max(run.get("val_failed_rate", 0.0) for run in self.runs):
            details.append(f"the scorer failed on {failed:.1%} of the answers")
        what, unit = ("score", "") if self.is_score else ("accuracy", " %")
        return (
            f"{self.name}: {what} on {self.source} {before}{self.text('after')}{unit} "
            f"({'; '.join(details)})"
        )


def experiments(summaries: Sequence[Summary]) -> list[Experiment]:
    """Return an experiment for each group of runs, data source and kind of accuracy."""
    found = []
    for group in grouped_summaries(summaries):
        by_metric: dict[tuple[str, str], list[tuple[Summary, Mapping[str, Any]]]] = {}
        for summary in group:
            for result in summary["results"]:
                by_metric.setdefault((result["data_source"], result["metric"]), []).append(
                    (summary, result)
                )
        found += [Experiment(*zip(*pairs, strict=True)) for pairs in by_metric.values()]
    return found


def _point(result: Mapping[str, Any], when: str, is_score: bool) -> str:
    return shown(Estimate(**result[when]["estimate"]), is_score) if result[when] else ""


def _change(paired: Mapping[str, Any] | None, is_score: bool) -> str:
    return (
        change(Paired(**{**paired, "difference": Estimate(**paired["difference"])}), is_score)
        if paired
        else ""
    )


# --- tables ---


def experiment_table(summaries: Sequence[Summary]) -> Table:
    rows = [
        [*_facts(each), each.runs[0]["decoding"], each.runs[0]["model"] or ""]
        for each in experiments(summaries)
    ]
    return Table(FACTS, rows)


def _facts(each: Experiment) -> list[str]:
    first, steps = each.runs[0], sorted({run["steps"] for run in each.runs})
    cells = [each.name, first["estimator"] or "", first["loss"] or "", each.source, each.metric]
    cells += [str(each.results[0]["questions"]), str(len(each.runs))]
    return [*cells, each.text("before"), each.text("after"), "–".join(map(str, steps))]


def run_table(summaries: Sequence[Summary]) -> Table:
    """Return a line for each accuracy of each run. A run without a validation has a line, too."""
    header = (
        "run",
        "seed",
        "status",
        "evaluated on",
        "metric",
        "before",
        "after",
        "change by question",
        "curve",
        "seconds",
        "hardware",
        "commit",
        "base weights (SHA-256)",
    )
    rows = []
    for summary in summaries:
        base = (summary.get("base") or NOT_RECORDED)[:12]
        made = [f"{summary['seconds']:.0f}", summary["hardware"], summary["commit"], base]
        for result in summary["results"] or [None]:
            cells = [summary["name"], str(summary["seed"]), summary["status"]]
            if result is None:
                cells += ["no validation", *[""] * 5]
            else:
                is_score = result["data_source"] in summary.get("scored", ())
                cells += [
                    result["data_source"],
                    result["metric"],
                    _point(result, "before", is_score),
                    _point(result, "after", is_score),
                    _change(result["change"], is_score),
                    sparkline([value for _, value in result["curve"]]),
                ]
            rows.append([*cells, *made])
    return Table(header, rows)


# --- the READMEs ---


def render(results: Path, summaries: Sequence[Summary]) -> str:
    """Return the text of ``results/README.md``."""
    found = by_hardest_source(summaries)
    # The pages of the real model have its controls
    shown = [each for each in found if not (each.is_control and each.source.startswith("real/"))]
    parts = [
        "# Results",
        "Generated by `python -m results.report --index` from the folders beside this file.",
        "![Held-out accuracy by step](learning_curve.svg)",
    ]
    begin, end = marks(page.BLOCK)
    statements = f"{begin}\n{page.headline_lines(page.made())}\n{end}"
    parts += ["## Statements of papers, in miniature", STATEMENTS, statements]
    parts += ["## Experiments", HOW_TO_READ, markdown_table(index_table(results, shown)), LINKS]
    return "\n\n".join(parts) + "\n"


def by_hardest_source(summaries: Sequence[Summary]) -> list[Experiment]:
    """Return each experiment once: its mean accuracy on its last, hardest data source."""
    last = {
        tuple(run["name"] for run in each.runs): each  # two experiments may share a name
        for each in experiments(summaries)
        if each.metric.startswith("mean@")
    }
    return list(last.values())


def headlines(summaries: Sequence[Summary]) -> list[Experiment]:
    """Return the finished experiments of HEADLINE_SEEDS seeds or more that are no controls."""
    return [
        each
        for each in by_hardest_source(summaries)
        if len(each.runs) >= HEADLINE_SEEDS
        and not each.is_control
        and all(run["status"] == "finished" for run in each.runs)
    ]


def index_table(results: Path, found: Sequence[Experiment]) -> Table:
    """Return a line for each experiment, with the command that repeats its first run."""
    rows = []
    for each in found:
        first = each.runs[0]
        minutes = sum(run["seconds"] for run in each.runs) / len(each.runs) / 60
        words = shlex.split(repeat(settings_of(results / first["recipe"] / first["run"])))
        keys = [word for word in words if "=" in word]
        command = f"`{' '.join(word for word in words if word not in keys)}`"
        if keys:
            command += f" and {len(keys)} key{'s' if len(keys) > 1 else ''}"
        rows.append(
            [
                f"[{each.name}]({first['name']}/)",
                f"{each.source}, {each.metric}",
                "; ".join([str(len(each.runs)), *each.unfinished]),
                each.text("before"),
                each.text("after"),
                f"{minutes:.0f}",
                command,
            ]
        )
    header = ("experiment", "evaluated on", "seeds", "before", "after", "minutes", "command")
    return Table(header, rows)


def headline_table(results: Path, headlined: Sequence[Experiment]) -> Table:
    """Return the headlines' lines for the top README, where a link leads to ``results/``."""
    found = index_table(results, headlined)
    rows = [[row[0].replace("](", "](results/"), *row[1:]] for row in found.rows]
    return Table(found.header, rows)


def render_curve(results: Path, headlined: Sequence[Experiment]) -> str:
    """Return the picture of the headlines: each recipe's own lab, and the real model on
    instructions, since there are colours for eight."""
    found = [
        each
        for each in headlined
        if each.source == "real/instructions" or each.name.endswith("/lab")
    ]
    return learning_curve(
        [[load_run(results / run["recipe"] / run["run"]) for run in each.runs] for each in found]
    )


def generated(results: Path) -> Iterator[tuple[Path, str]]:
    """Yield the generated files that this module knows, with their texts."""
    summaries = read_summaries(results)  # once: it resolves the settings of every run
    headlined = headlines(summaries)
    yield results / "README.md", render(results, summaries)
    if headlined:
        yield results / "learning_curve.svg", render_curve(results, headlined)
    readme = results.resolve().parent / "README.md"
    if readme.exists():
        block = markdown_table(headline_table(results, headlined))
        yield readme, with_block(readme.read_text(encoding="utf-8"), "results", block)
