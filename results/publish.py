"""The command that commits a run: ``python -m results.publish RUN [--as RECIPE/NAME]``.

It turns ``outputs/<recipe>/<run>/`` into ``results/<recipe>/<run>/{config.yaml, manifest.json,
summary.json, metrics.csv, validation.jsonl.gz, samples.jsonl.gz}``, without machine paths and host
names. ``summary.json`` is a function of the others. Afterwards, ``python -m results.report
--index`` brings the tables up to date.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from core.errors import InputError
from core.tracking.validation import ValRecord
from results.reporting.answers import published_samples
from results.reporting.run_reader import RecordedRun, load_run, read_yaml, run_copy, scrub
from results.reporting.summaries import summarise

# metrics.csv holds at most about this many steps, evenly spaced, and every validation
METRICS_ROWS = 500
# Beyond it validation.jsonl.gz holds the first and the last evaluation only
VALIDATION_BYTES = 1_000_000
SAMPLES = 50  # questions of each data source in samples.jsonl.gz


def publish(folder: str | Path, target: str | Path) -> Path:
    """Write the committed copy of a run, in place of an earlier copy.

    Raises:
        NotARun: ``folder`` is no run folder.
    """
    run, target = load_run(folder), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    # the copy is known by the name it is given, and no longer runs where a process was killed
    status = {"running": "unfinished"}.get(run.manifest["status"], run.manifest["status"])
    name = {"recipe": target.parent.name, "run": target.name}
    # metrics.csv may lack the rows of which this is the sum
    seconds = {"seconds_in_steps": round(run.seconds, 3)}
    manifest = {**run.manifest, **name, "status": status, **seconds}
    (target / "manifest.json").write_text(
        json.dumps(scrub(manifest), indent=1) + "\n", encoding="utf-8"
    )
    config = read_yaml((run.folder / "config.yaml").read_text(encoding="utf-8"))
    (target / "config.yaml").write_text(
        yaml.safe_dump(scrub(config), sort_keys=False), encoding="utf-8"
    )
    _write_csv(target / "metrics.csv", run)
    _write_rows(target / "samples.jsonl.gz", _packed(published_samples(run, SAMPLES)))
    _write_rows(target / "validation.jsonl.gz", _packed_validation(run.validation))
    summary = summarise(load_run(target))
    (target / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return target


def _write_csv(path: Path, run: RecordedRun) -> None:
    metrics = run.metrics
    stride = -(-len(metrics) // METRICS_ROWS) or 1
    kept = [
        row
        for i, row in enumerate(metrics)
        if i % stride == 0
        or i == len(metrics) - 1
        or any(name.startswith("val-core/") for name in row)
    ]
    names = sorted({name for row in kept for name in row} - {"step"})
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *names])
        writer.writerows(
            [row["step"], *(f"{row[n]:.6g}" if n in row else "" for n in names)] for row in kept
        )


def _packed_validation(validation: Mapping[int, Sequence[ValRecord]]) -> bytes:
    """Return every evaluation's accuracies by question (and rewards, where they are others),
    compressed; the first and the last where all are too large.

    A question's lines stand together, which compresses best.
    """
    ends = [min(validation), max(validation)] if validation else []
    for steps in (sorted(validation), sorted(set(ends))):
        by_question: dict[tuple[str, str], list[dict[str, object]]] = {}
        for step in steps:
            for r in validation[step]:
                line = {
                    "step": step,
                    "uid": r.uid,
                    "data_source": r.data_source,
                    "acc": list(r.values["acc"]),
                }
                if r.values.get("reward", r.values["acc"]) != r.values["acc"]:
                    line["reward"] = list(r.values["reward"])
                by_question.setdefault((r.data_source, r.uid), []).append(line)
        packed = _packed(line for lines in by_question.values() for line in lines)
        if len(packed) <= VALIDATION_BYTES:
            break
    return packed


def _packed(rows: Iterable[Mapping[str, object]]) -> bytes:
    """Return JSON Lines, gzipped; equal rows give equal bytes, since neither time nor name is in
    them."""
    text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=0) as file:
        file.write(text.encode())
    return out.getvalue() if text else b""


def _write_rows(path: Path, packed: bytes) -> None:
    path.unlink(missing_ok=True)
    if packed:
        path.write_bytes(packed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish what the command line names and return the exit status: 2 where it cannot be
    published."""
    parser = argparse.ArgumentParser(
        prog="python -m results.publish", description="Commits a run's small files."
    )
    parser.add_argument(
        "run", metavar="RUN", help="The run folder, outputs/<recipe>/<run>, or its URL."
    )
    parser.add_argument(
        "--as",
        dest="name",
        metavar="RECIPE/NAME",
        help="The name of the copy in results/ (default: the folder's own).",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        run = run_copy(args.run)
        print(f"published as {publish(run, args.results / (args.name or load_run(run).name))}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("the tables of results/: python -m results.report --index")
    return 0


if __name__ == "__main__":
    sys.exit(main())
