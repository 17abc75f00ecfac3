"""The command that commits a run: ``python -m results.publish RUN [--as RECIPE/RUN]``.

It turns ``outputs/<recipe>/<run>/`` into ``results/<recipe>/<run>/{config.yaml, manifest.json, summary.json,
metrics.csv, validation.jsonl}``, without machine paths and host names. ``summary.json`` is a function of the other
four. Afterwards, ``python -m results.report --index`` brings the tables up to date.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from core.tracking.tracker import json_line
from core.tracking.validation import ValRecord
from results.reporting.run_reader import NotARun, load_run, scrub, summarise

METRICS_ROWS = 500  # metrics.csv holds at most about this many steps, evenly spaced, and every validation
VALIDATION_BYTES = 1_000_000  # a larger validation.jsonl is not committed


def publish(folder: str | Path, target: str | Path) -> Path:
    """Write the committed copy of a run, in place of an earlier copy.

    Raises:
        NotARun: ``folder`` is no run folder.
    """
    run, target = load_run(folder), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    # the copy is known by the name it is given
    manifest = {**run.manifest, "recipe": target.parent.name, "run": target.name}
    (target / "manifest.json").write_text(json.dumps(scrub(manifest), indent=1) + "\n", encoding="utf-8")
    config = yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
    (target / "config.yaml").write_text(yaml.safe_dump(scrub(config), sort_keys=False), encoding="utf-8")
    _write_csv(target / "metrics.csv", run.metrics)
    _write_validation(target / "validation.jsonl", run.validation)
    summary = summarise(load_run(target))
    (target / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return target


def _write_csv(path: Path, metrics: Sequence[Mapping[str, float]]) -> None:
    stride = -(-len(metrics) // METRICS_ROWS) or 1
    kept = [
        row
        for i, row in enumerate(metrics)
        if i % stride == 0 or i == len(metrics) - 1 or any(name.startswith("val-core/") for name in row)
    ]
    names = sorted({name for row in kept for name in row} - {"step"})
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *names])
        writer.writerows([row["step"], *(f"{row[n]:.6g}" if n in row else "" for n in names)] for row in kept)


def _write_validation(path: Path, validation: Mapping[int, Sequence[ValRecord]]) -> None:
    """Write the accuracies of the first and the last validation, unless they are too large to commit."""
    lines = [
        json_line({"step": step, "uid": r.uid, "data_source": r.data_source, "acc": list(r.values["acc"])})
        for step in sorted({min(validation), max(validation)} if validation else ())
        for r in validation[step]
    ]
    text = "".join(lines)
    path.unlink(missing_ok=True)
    if lines and len(text.encode()) <= VALIDATION_BYTES:
        path.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish the run that the command line names and return the exit status: 2 where it is no run."""
    parser = argparse.ArgumentParser(prog="python -m results.publish", description="Commits a run's small files.")
    parser.add_argument("run", metavar="RUN", help="The run folder: outputs/<recipe>/<run>.")
    parser.add_argument(
        "--as", dest="name", metavar="RECIPE/RUN", help="The name of the copy in results/ (default: the run's own)."
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        print(f"published as {publish(args.run, args.results / (args.name or load_run(args.run).name))}")
    except NotARun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("the tables of results/: python -m results.report --index")
    return 0


if __name__ == "__main__":
    sys.exit(main())
