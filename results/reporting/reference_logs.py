"""What the sources of the rows of ``references.yaml`` hold beyond one number: steps, noise, curves, repetitions.

A published number is one validation of one run. Here is which one, how far a question set of that size scatters by
itself, how the run went on, and what others got from the same recipe. Which runs of this repository stand beside a row
is in :mod:`results.reporting.references`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from core.files import write_atomic
from core.tracking.confidence_intervals import Estimate, wilson
from core.tracking.run_manifest import ROOT
from results.reporting.numbers import percent
from results.reporting.pages import Table, sparkline

Row = Mapping[str, Any]
CURVES = ROOT / "results" / "references" / "curves"
VERIFIED = "verified.yaml"  # of results/; the tests that repeat published runs write it


def read_references(results: Path) -> Mapping[str, Any]:
    """Return ``references.yaml`` of a results folder, with what its ``verified.yaml`` names under ``verified``."""
    record = results / VERIFIED
    verified = yaml.safe_load(record.read_text(encoding="utf-8")) if record.exists() else None
    return {**yaml.safe_load((results / "references.yaml").read_text(encoding="utf-8")), "verified": verified or []}


def forget_verified(results: Path, name: str) -> None:
    """Take the run ``recipe/run`` out of ``verified.yaml``: a test has repeated the copy that another one replaces."""
    record = results / VERIFIED
    if not record.exists():
        return
    text = record.read_text(encoding="utf-8")
    entries = yaml.safe_load(text) or []
    kept = [entry for entry in entries if f"{entry['experiment'].partition('/')[0]}/{entry['run']}" != name]
    if len(kept) < len(entries):
        head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
        write_atomic(record, head + yaml.safe_dump(kept, sort_keys=False, width=200))


def sources(row: Row) -> list[str]:
    return row["data_source"].split(", ")


def reported(row: Row, source: str | None = None) -> Estimate:
    """Return a row's number, or its number of one data set, with the 95 % interval of its number of questions.

    Wilson's interval of one answer a question: of several answers a question it is an upper bound of their noise. The
    variances of the data sets add up in the interval of their mean. It has no bounds where the number of questions is
    not known. What another seed would change is not in it.
    """
    if source is None and "values" in row:
        each = [reported(row, one) for one in row["values"]]
        half = math.hypot(*((one.high - one.low) / 2 for one in each)) / len(each)
        return Estimate(
            row["value"] / 100, row["value"] / 100 - half, row["value"] / 100 + half, sum(e.n for e in each)
        )
    value = (row["value"] if source is None else row["values"][source]) / 100
    questions = row.get("questions")
    n = questions[source] if source is not None and isinstance(questions, Mapping) else questions
    return Estimate(value, None, None, 0) if n is None else Estimate(value, *wilson(value, n), n)


def published_curve(row_id: str) -> dict[str, list[tuple[int, float]]]:
    """Return data source -> (step, percent) of each validation in a row's log; empty where that is not here."""
    path = CURVES / f"{row_id}.csv"
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        found: dict[str, list[tuple[int, float]]] = {}
        for line in csv.DictReader(file):
            found.setdefault(line["data_source"], []).append((int(line["step"]), float(line["percent"])))
        return found


# --- tables ---


def log_table(references: Mapping[str, Any]) -> Table:
    """Return a line a row: its number with the question set's noise, where it was read, and the rest of its run."""
    header = ["row", "reported", "questions", "read at step", "printed by the source", "last", "highest", "curve"]
    rows = []
    for row in references["references"]:
        log, curve = row.get("log", {}), published_curve(row["id"]).get(row["data_source"], [])
        estimate = reported(row)
        last, highest = _validation(log.get("last")), _validation(log.get("highest"))
        step = str(log["last"]["step"]) if log else "not stated"
        count = f" ({log['questions']} in its log)" if "questions" in log else ""
        questions = f"{estimate.n}{count}" if estimate.n else "not stated"
        drawn = f"{sparkline([value for _, value in curve])} {len(curve)} validations"
        cells = [row["id"], percent(estimate), questions, step, _quoted(row), last or "not read", highest or "not read"]
        rows.append([*cells, drawn if curve else "not available here"])
    return Table(header, rows)


def _validation(one: Mapping[str, Any] | None) -> str:
    return f"{one['value']:.1f} (step {one['step']})" if one else ""


def _quoted(row: Row) -> str:
    if "quoted" not in row:
        return "the same"
    step = row["quoted"]["step"]
    where = "in no validation of its log" if step == "none" else f"step {step}"
    return f"{row['quoted']['value']:.1f} ({where})"


def replication_table(references: Mapping[str, Any]) -> Table:
    """Return what others measured when they repeated a row, beside the row's number."""
    known = {row["id"]: row for row in references["references"]}
    rows = []
    for one in references.get("replications", ()):
        row, source = known[one["of"]], one.get("data_source")
        there = reported(row, source).value * 100
        when = ", ".join(
            [one.get("reported", "when is not stated"), *([f"step {one['step']}"] if "step" in one else [])]
            + ([f"highest {one['highest']:.1f}"] if "highest" in one else [])
        )
        cells = [row["id"], source or "as the row", f"{there:.1f}", f"{one['value']:.1f} ({when})"]
        cells += [f"{one['value'] - there:+.1f}", one["by"], one["what"], f"{one['source']} [{one['tag']}]"]
        rows.append(cells)
    header = ["row", "evaluated on", "reported", "repeated", "difference", "by", "what is different", "source"]
    return Table(header, rows)
