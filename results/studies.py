"""Runs what is missing of every study, within a budget: ``make studies BUDGET_MIN=30``.

    python -m results.studies [--budget-min 30] [--jobs 2] [--list]

A study is a ``study*.yaml`` of a recipe and has a command of its own, which this one calls in turn. What is still
missing is listed at the end. Exits with 1 where a study's command failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core.tracking.run_manifest import ROOT
from results.reporting.study import Records, Study, load_study


def missing(study: Study, results: Path) -> int:
    """Return how many of the study's runs have no finished record."""
    done = Records(results / study.recipe / study.name).read(study)
    return sum(key not in done or done[key].status != "finished" for key in study.runs)


def show(studies: Sequence[Study], results: Path) -> None:
    for study in studies:
        left = missing(study, results)
        state = f"{left} of {len(study.runs)} runs are missing" if left else f"all {len(study.runs)} runs are there"
        print(f"{study.command}: {state}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m results.studies", description="Run what is missing of all studies."
    )
    parser.add_argument("--budget-min", type=float, default=float("inf"), help="Start no run beyond these minutes.")
    parser.add_argument("--jobs", type=int, default=2, help="The processes side by side, one thread each.")
    parser.add_argument("--list", action="store_true", help="Run nothing, and list what is missing.")
    args = parser.parse_args(arguments)
    results, deadline, failed = Path("results"), time.monotonic() + 60 * args.budget_min, False
    studies = [load_study(path) for path in sorted((ROOT / "recipes").glob("*/study*.yaml"))]
    for study in () if args.list else studies:
        left_min = (deadline - time.monotonic()) / 60
        if left_min > 0 and missing(study, results):
            command = [sys.executable, *study.command.split()[1:], "--jobs", str(args.jobs)]
            failed |= subprocess.run([*command, "--budget-min", f"{left_min:.1f}"]).returncode != 0
    show(studies, results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
