"""The numbers that papers report, each beside the runs here that name it, or with the command that
would measure it.

A run names a row of ``results/references.yaml`` by ``trainer.reference``. It stands beside the
row's number only if it is finished, was validated at its end on all of the row's questions, and has
the settings that the row names; a row's own departures are allowed and shown. What else names a row
is listed with the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.config.section import show
from core.errors import InputError
from core.tracking.validation import Estimate, wilson
from results.reporting.accuracies import macro_average
from results.reporting.comparison import seed_interval
from results.reporting.numbers import evidence, percent
from results.reporting.pages import Table
from results.reporting.run_reader import flatten, read_yaml
from results.reporting.summaries import Summary, group_name, grouped_summaries

Row = Mapping[str, Any]
VERIFIED = "verified.yaml"  # of results/; the tests that repeat published runs write it


def read_references(results: Path) -> Mapping[str, Any]:
    """Return ``references.yaml`` of a results folder, with what its ``verified.yaml`` names under
    ``verified``."""
    record = results / VERIFIED
    verified = yaml.safe_load(record.read_text(encoding="utf-8")) if record.exists() else None
    return {
        **yaml.safe_load((results / "references.yaml").read_text(encoding="utf-8")),
        "verified": verified or [],
    }


def sources(row: Row) -> list[str]:
    return row["data_source"].split(", ")


def reported(row: Row, source: str | None = None) -> Estimate:
    """Return a row's number, or its number of one data set, with the 95 % interval of its number of
    questions.

    Wilson's interval of one answer a question: of several answers a question it is an upper bound
    of their noise. The variances of the data sets add up in the interval of their mean. It has no
    bounds where the number of questions is not known. What another seed would change is not in it.
    """
    if source is None and "values" in row:
        mean = macro_average([reported(row, one) for one in row["values"]])
        shift = row["value"] / 100 - mean.value  # a source rounds its own mean
        return Estimate(mean.value + shift, mean.low + shift, mean.high + shift, mean.n)
    value = (row["value"] if source is None else row["values"][source]) / 100
    questions = row.get("questions")
    n = questions[source] if source is not None and isinstance(questions, Mapping) else questions
    return Estimate(value, None, None, 0) if n is None else Estimate(value, *wilson(value, n), n)


# --- which runs stand beside a row ---

MODEL = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class Departure:
    """A setting that differs from the row's. ``why`` is the row's reason to allow it, None where it
    does not."""

    key: str
    here: Any
    there: Any
    why: str | None = None

    def __str__(self) -> str:
        return f"{self.key} is {show(self.here)} here, {show(self.there)} there"


def departures(row: Row, recipe: str, flat: Mapping[str, Any]) -> list[Departure]:
    """Return what differs from the row, in the row's order. ``flat`` is a configuration as flat key
    -> value."""
    departed = [] if recipe == row["recipe"] else [Departure("the recipe", recipe, row["recipe"])]
    allowed = {
        (one["key"], _plain(one["here"])): one["why"]
        for one in row.get("departures", ())
        if "key" in one
    }
    for key, there in {MODEL: row["model"], **row.get("settings", {})}.items():
        here = flat.get(key)
        if _plain(here) != _plain(there):
            departed.append(Departure(key, here, there, allowed.get((key, _plain(here)))))
    return departed


def _plain(value: Any) -> str:
    """Return one text for equal values: 1 and 1.0, a tuple and a list."""
    return show(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def unknown(name: str) -> str:
    return f"trainer.reference={name}: results/references.yaml has no row of this id"


@dataclass(frozen=True)
class NamedRun:
    """A published run that names a row. ``reasons`` keep it from standing beside the row's
    number."""

    summary: Summary
    row: Row
    allowed: Sequence[Departure]
    reasons: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.summary['recipe']}/{self.summary['run']}"

    def accuracy(self, source: str) -> Estimate:
        return Estimate(**_result(self.row, self.summary, source)["after"]["estimate"])

    @property
    def macro(self) -> Estimate:
        """The mean over the row's data sets; the variances of the sets' means add up in its
        interval."""
        found = [self.accuracy(source) for source in sources(self.row)]
        return found[0] if len(found) == 1 else macro_average(found)


def named_runs(
    results: Path, summaries: Sequence[Summary], references: Mapping[str, Any]
) -> list[NamedRun]:
    """Return the runs that name a row.

    Raises:
        InputError: one of them names a row that does not exist.
    """
    known = {row["id"]: row for row in references["references"]}
    naming = [one for one in summaries if "reference" in one]
    if strange := [one for one in naming if one["reference"] not in known]:
        raise InputError(
            [f"{one['recipe']}/{one['run']}: {unknown(one['reference'])}" for one in strange]
        )
    found = []
    for summary in naming:
        row = known[summary["reference"]]
        file = results / summary["recipe"] / summary["run"] / "config.yaml"
        config = flatten(read_yaml(file.read_text(encoding="utf-8")))
        differing = departures(row, summary["recipe"], config)
        reasons = [
            *(str(one) for one in differing if one.why is None),
            *_incomplete(row, summary, config),
        ]
        found.append(
            NamedRun(summary, row, [one for one in differing if one.why is not None], reasons)
        )
    return found


def _result(row: Row, summary: Summary, source: str) -> Mapping[str, Any] | None:
    metric = row.get("metric", "mean@1")
    return next(
        (r for r in summary["results"] if (r["data_source"], r["metric"]) == (source, metric)), None
    )


def _incomplete(row: Row, summary: Summary, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a run lacks of an accuracy at the end of a finished run, on all of the row's
    questions."""
    if summary["status"] != "finished":
        yield f"its status is {summary['status']}"
    at_the_end = summary["steps"] == config.get("trainer.total_training_steps")
    evaluates = row.get("settings", {}).get("trainer.val_only", False)
    if config.get("trainer.val_only") and not evaluates and not at_the_end:
        yield f"it only validates, the model of step {summary['steps']}"
    for source in sources(row):
        result = _result(row, summary, source)
        if result is None:
            yield f"it has no {row.get('metric', 'mean@1')} on {source}"
            continue
        there = row.get("questions")
        there = there.get(source) if isinstance(there, Mapping) else there
        if there is not None and result["questions"] != there:
            yield f"{source} has {result['questions']} questions here, {there} there"
        if result["after"]["step"] != summary["steps"]:
            yield f"its last validation is of step {result['after']['step']} of {summary['steps']}"


@dataclass(frozen=True)
class Measured:
    """The runs of one experiment that stand beside a row: they differ in their seeds only."""

    runs: Sequence[NamedRun]

    @property
    def name(self) -> str:
        return group_name([run.name for run in self.runs])

    def accuracy(self, source: str | None = None) -> Estimate:
        """Return the accuracy over the seeds on one data source, or on all of the row's."""
        found = [run.macro if source is None else run.accuracy(source) for run in self.runs]
        return found[0] if len(found) == 1 else seed_interval([one.value for one in found])


def measured(row: Row, runs: Sequence[NamedRun]) -> list[Measured]:
    entering = {
        id(run.summary): run for run in runs if run.row["id"] == row["id"] and not run.reasons
    }
    groups = grouped_summaries([run.summary for run in entering.values()])
    return [Measured([entering[id(summary)] for summary in group]) for group in groups]


# --- tables ---


def _known(row: Row) -> list[str]:
    found = sources(row)
    where = found[0] if len(found) == 1 else f"mean of {len(found)} data sets"
    return [
        row["id"],
        row["method"],
        row["model"],
        where,
        percent(reported(row)),
        f"{row['source']} [{row['tag']}]",
    ]


def reference_table(references: Mapping[str, Any], runs: Sequence[NamedRun]) -> Table:
    """Return what others report, with its source, beside what was measured here or the command that
    would."""
    header = [
        "row",
        "method",
        "model",
        "evaluated on",
        "reported",
        "source",
        "here",
        "difference",
        "departures",
    ]
    rows = []
    for row in references["references"]:
        if "not_reproducible" in row:
            continue
        found = measured(row, runs)
        for each in found:
            estimate = each.accuracy()
            used = dict.fromkeys(f"{one} ({one.why})" for run in each.runs for one in run.allowed)
            used |= dict.fromkeys(one["what"] for one in row.get("departures", ()) if "what" in one)
            cells = [
                f"{percent(estimate)} ({each.name})",
                f"{100 * estimate.value - row['value']:+.1f}",
            ]
            summaries = [run.summary for run in each.runs]
            support = evidence(each.name, summaries, references["verified"])
            rows.append([*_known(row), *cells, "; ".join(used) or "none", support])
        if not found:
            rows.append([*_known(row), "", "", "", f"not run (`{row['command']}`)"])
    return Table([*header, "evidence"], rows)


def set_table(references: Mapping[str, Any], runs: Sequence[NamedRun]) -> Table:
    """Return reported and measured accuracies of rows of several data sets, a line a set; only of
    what was measured."""
    rows = []
    for row in references["references"]:
        for each in measured(row, runs) if "values" in row else ():
            for source, there in row["values"].items():
                here = each.accuracy(source)
                cells = [
                    row["id"],
                    each.name,
                    source,
                    percent(reported(row, source)),
                    percent(here),
                ]
                rows.append([*cells, f"{100 * here.value - there:+.1f}"])
    return Table(["row", "runs", "data set", "reported", "here", "difference"], rows)


def differing_table(runs: Sequence[NamedRun]) -> Table:
    rows = [
        [f"[{run.name}]({run.name}/)", run.row["id"], "; ".join(run.reasons)]
        for run in runs
        if run.reasons
    ]
    return Table(["run", "row", "what keeps it out of the row"], rows)


def closed_table(references: Mapping[str, Any]) -> Table:
    rows = [
        [*_known(row), row["not_reproducible"]]
        for row in references["references"]
        if "not_reproducible" in row
    ]
    return Table(["row", "method", "model", "evaluated on", "reported", "source", "why"], rows)


def remarks(references: Mapping[str, Any]) -> list[str]:
    """Return a line for each note and each departure that is a sentence, with the rows that have
    it."""
    found: dict[str, list[str]] = {}
    for row in references["references"]:
        texts = [row["note"]] if "note" in row else []
        for one in row.get("departures", ()):
            what = one.get("what", f"{one.get('key')}={one.get('here')} is allowed")
            texts.append(f"{what}: {one['why']}")
        for text in texts:
            found.setdefault(text, []).append(row["id"])
    return [f"- {_shortened(ids)}: {text}" for text, ids in found.items()]


def _shortened(ids: Sequence[str]) -> str:
    """Return ``dapo-32b-* (9 rows)`` for many ids, the ids themselves for a few."""
    if len(ids) <= 3:
        return ", ".join(ids)
    heads: dict[str, list[str]] = {}
    for one in ids:
        heads.setdefault(one.partition("-")[0], []).append(one)
    return ", ".join(f"{os.path.commonprefix(same)}* ({len(same)} rows)" for same in heads.values())
