"""The command that shows which run scripts run on some GPUs: ``make feasible GPU=H100 N=8``.

    python -m results.feasible --gpu H100 -n 8

It plans each ``recipes/*/run_*.sh`` for a number of GPUs of one kind, with the script's own settings. It prints whether
the script fits, or which setting or number of GPUs would do; hours and disk; and whether a run was published here.
Nothing is downloaded or started. A plan is an estimate (``python -m core.plan``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import InputError
from core.planning.model_shapes import TABLE
from core.tracking.run_manifest import ROOT
from results.reporting.feasibility import table
from results.reporting.run_scripts import read_summaries


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"N={text}: must be a whole number of GPUs, at least 1; write N=8")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status: 2 where the GPU or the number is at fault."""
    parser = argparse.ArgumentParser(prog="python -m results.feasible", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = f"The kind of GPU (default %(default)s): one of {', '.join(TABLE['gpus'])}."
    parser.add_argument("--gpu", default="H100", help=known)
    parser.add_argument("-n", "--number", default="8", help="The number of GPUs (default %(default)s).")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        rows = table(args.gpu, _number(args.number), read_summaries(args.results))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    widths = [max(len(cells[column]) for cells, _ in rows) for column in range(len(rows[0][0]))]
    for cells, note in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        if note:
            print(f"    {note}")
    print("Times and sizes of GPUs are estimates: python -m core.plan has the assumptions, and options for others.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
