"""Tables of results: in a report, in ``results/README.md`` and in the top README, all made from run
summaries.

No number in them is typed: a test generates the two READMEs again from the committed folders and
compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.config import Config
from core.tracking.run_manifest import ROOT
from core.tracking.validation import Estimate
from results.reporting.comparison import Paired, seed_interval
from results.reporting.curves import learning_curve
from results.reporting.numbers import change, evidence, shown
from results.reporting.pages import Table, markdown_table, sparkline
from results.reporting.run_reader import NOT_RECORDED, load_run
from results.reporting.summaries import Summary, group_name, grouped_summaries, read_summaries

VERIFIED = "verified.yaml"  # of results/; the tests that repeat published runs write it
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
LAB_TASKS = ("tools", "users", "figures")  # of recipes/lab/run_lab.sh
CONTROL = "-blank"  # how an experiment ends that is not meant to learn: it is no headline
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
)
SETTING = ("decoding", "model", "command")


@dataclass(frozen=True)
class Experiment:
    """One kind of accuracy on one data source, of the runs that differ in their seeds only."""

    runs: Sequence[Summary]
    results: Sequence[Mapping[str, Any]]  # one a run

    @property
    def name(self) -> str:
        return group_name([run["name"] for run in self.runs])

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
            values = self.values(when)
            return (
                shown(seed_interval(values), self.is_score)
                if len(values) == len(self.results)
                else ""
            )
        return _point(self.results[0], when, self.is_score)

    @property
    def sentence(self) -> str:
        before = f"{self.text('before')} → " if self.text("before") else ""
        seeds = f", {len(self.runs)} seeds" if len(self.runs) > 1 else ""
        result = self.results[0]
        details = [
            f"{self.metric}, {result['questions']} questions, step {result['after']['step']}{seeds}"
        ]
        details += sorted({run["status"] for run in self.runs} - {"finished"})
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
    rows = [[*_facts(each), *_setting(each)] for each in experiments(summaries)]
    return Table([*FACTS, *SETTING], rows)


def indexed_table(found: Sequence[Experiment], verified: Sequence[Mapping[str, str]]) -> Table:
    """Return the table of experiments with the evidence of each."""
    rows = [
        [*_facts(each), evidence(each.name, each.runs, verified), *_setting(each)] for each in found
    ]
    return Table([*FACTS, "evidence", *SETTING], rows)


def _facts(each: Experiment) -> list[str]:
    first, steps = each.runs[0], sorted({run["steps"] for run in each.runs})
    cells = [each.name, first["estimator"] or "", first["loss"] or "", each.source, each.metric]
    cells += [str(each.results[0]["questions"]), str(len(each.runs))]
    return [*cells, each.text("before"), each.text("after"), "–".join(map(str, steps))]


def _setting(each: Experiment) -> list[str]:
    first = each.runs[0]
    return [first["decoding"], first["model"] or "", f"`{short_command(first['command'])}`"]


def short_command(command: str) -> str:
    """Return the command as one would type it: the preset's script if there is one.

    It lacks the backend, and the seed where that is the default, which an experiment's first run
    has.
    """
    _, _, line = command.partition(" -m ")
    module, *words = line.split() or [command]
    left_out = f"trainer.seed={Config().trainer.seed}"
    words = [word for word in words if word != left_out and not word.startswith("trainer.backend=")]
    preset = words[0].removeprefix("preset=") if words else ""
    script = Path(*module.split(".")[:2], f"run_{preset}.sh")
    if words[1:2] == ["--"] and (ROOT / script).exists():
        return " ".join(["bash", str(script), *words[2:]])
    kind = preset.removeprefix("lab_")
    if kind in LAB_TASKS and "--" in words:  # their script gives what stands before --
        given = words[words.index("--") + 1 :]
        own = re.compile(rf"trainer\.experiment_name=lab-{kind}-seed\d+")
        return " ".join(
            [
                "bash recipes/lab/run_lab.sh",
                kind,
                *(word for word in given if not own.fullmatch(word)),
            ]
        )
    return " ".join([f"python -m {module}" if line else module, *words])


def run_table(
    summaries: Sequence[Summary],
    linked: bool = False,
    verified: Sequence[Mapping[str, str]] | None = None,
) -> Table:
    """Return a line for each accuracy of each run; its last column is the evidence where
    ``verified`` is given.

    A run without a validation has a line, too, which says so.
    """
    header = [
        "run",
        "seed",
        "status",
        "evaluated on",
        "metric",
        "before",
        "after",
        "change by question",
        "curve",
    ]
    rows = []
    for summary in summaries:
        name = summary["name"]
        for result in summary["results"] or [None]:
            cells = [
                f"[{name}]({name}/)" if linked else name,
                str(summary["seed"]),
                summary["status"],
            ]
            if result is None:
                cells += ["no validation", *[""] * 5]
            else:
                is_score = result["data_source"] in summary.get("scored", ())
                before, after = (_point(result, when, is_score) for when in ("before", "after"))
                cells += [result["data_source"], result["metric"], before, after]
                cells += [
                    _change(result["change"], is_score),
                    sparkline([value for _, value in result["curve"]]),
                ]
            last = summary["commit"] if verified is None else evidence(name, [summary], verified)
            base = (summary.get("base") or NOT_RECORDED)[:12]
            rows.append([*cells, f"{summary['seconds']:.0f}", summary["hardware"], last, base])
    last = "commit" if verified is None else "evidence"
    return Table([*header, "seconds", "hardware", last, "base weights (SHA-256)"], rows)


def render(results: Path) -> str:
    """Return the text of ``results/README.md``."""
    summaries = read_summaries(results)
    found = experiments(summaries)
    record = results / VERIFIED
    verified = yaml.safe_load(record.read_text(encoding="utf-8")) if record.exists() else []
    several, single = (
        [one for one in found if (len(one.runs) > 1) is many] for many in (True, False)
    )
    parts = [
        "# Results",
        "Generated by `python -m results.report --index` from the folders beside this file; not "
        "edited by hand.",
        "Accuracies are percentages, taken at the last validation of a run, never at the best "
        "one. Square brackets "
        "hold 95 % intervals: over seeds (Student, cut at 0 and 100), after the sample standard "
        "deviation (±), where "
        "there are several, over questions (Wilson, a question is one cluster) where there is one.",
        "Each number has its evidence. *Verified*: a test repeats it to the bit, or a second run "
        "came out inside its "
        "interval. *Measured*: it was run here, with so many seeds at that commit. *Not run*: the "
        "command that would "
        "produce it.",
        "## Experiments",
        markdown_table(indexed_table(several, verified))
        if several
        else "None of several seeds was published yet.",
        *(_section("## Experiments of one seed", indexed_table(single, verified))),
        *(_section("## Runs", run_table(summaries, linked=True, verified=verified))),
        "Curves, samples and settings, or a comparison of runs: `python -m results.report "
        "results/<recipe>/<run> ...`. "
        "Papers' tables in miniature, with a verdict for each statement: [tables](tables/).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, table: Table) -> list[str]:
    return [title, markdown_table(table)] if table.rows else []


def headlines(summaries: Sequence[Summary]) -> list[Experiment]:
    """Return the finished experiments of HEADLINE_SEEDS seeds or more, each on its last, hardest
    data source."""
    last = {
        each.name: each
        for each in experiments(summaries)
        if len(each.runs) >= HEADLINE_SEEDS
        and each.metric.startswith("mean@")
        and not each.name.endswith(CONTROL)
        and all(run["status"] == "finished" for run in each.runs)
    }
    return list(last.values())


def headline_table(summaries: Sequence[Summary]) -> Table:
    """Return the headlines' mean accuracies, without details of the method."""
    rows = []
    for each in headlines(summaries):
        questions = f"{each.results[0]['questions']} questions of {each.source}, {each.metric}"
        cells = [each.name, questions, str(len(each.runs)), each.text("before"), each.text("after")]
        rows.append([*cells, f"`{short_command(each.runs[0]['command'])}`"])
    return Table(["experiment", "evaluated on", "seeds", "before", "after", "command"], rows)


def render_curve(results: Path) -> str:
    """Return the picture of the headlines: each recipe's own lab, and the real model, a colour
    each."""
    found = [each for each in headlines(read_summaries(results)) if "/lab-" not in each.name]
    return learning_curve(
        [[load_run(results / run["recipe"] / run["run"]) for run in each.runs] for each in found]
    )


def render_block(results: Path) -> str:
    """Return what stands between the markers of the top README."""
    return markdown_table(headline_table(read_summaries(results)))


def with_block(readme: str, block: str) -> str | None:
    """Return the README with the block between its markers, or None where it has no markers."""
    first, last = readme.find(BEGIN), readme.find(END)
    if first < 0 or last < first:
        return None
    return f"{readme[: first + len(BEGIN)]}\n{block}\n{readme[last:]}"


def update(results: Path, check: bool = False) -> int:
    """Write the generated files, or compare them with ``check``; return 1 where a check found a
    difference, else 0."""
    wanted = {results / "README.md": render(results)}
    if headlines(read_summaries(results)):
        wanted[results / "learning_curve.svg"] = render_curve(results)
    readme = results.resolve().parent / "README.md"
    if readme.exists():
        old = readme.read_text(encoding="utf-8")
        text = with_block(old, render_block(results))
        if text is None:
            print(
                f"warning: {readme.name} has no lines {BEGIN} and {END}: no table was put there",
                file=sys.stderr,
            )
        else:
            wanted[readme] = text
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if check:
            print(f"{path} is out of date: run python -m results.report --index", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path}")
    return int(check and bool(stale))
