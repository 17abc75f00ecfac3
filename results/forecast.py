"""Where a run will end: the sigmoid through its first half, at its last planned step, with a 90 % interval.

    python -m results.forecast RUN [RUN ...]       beside it, how good such forecasts were on the published runs
    python -m results.forecast --measure           measures that: writes results/benchmarks/forecast.md and .json

A RUN is a run folder (``outputs/<recipe>/<run>``), also of a run that goes on, or a published copy
(``results/<recipe>/<run>``). It needs four validations after step 0 in the first half of its steps
(``trainer.test_freq``). The fit describes runs that rise and level off; it foresees no collapse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import InputError
from results.reporting.forecasts import accuracy_of_forecasts, forecast_run, said, write_measured
from results.reporting.run_reader import load_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line names and return the exit status: 2 for bad input, of one run among several too."""
    parser = argparse.ArgumentParser(prog="python -m results.forecast", description="Where a run will end.")
    parser.add_argument("runs", nargs="*", metavar="RUN", type=Path, help="Run folders, or published copies.")
    parser.add_argument("--measure", action="store_true", help="Measure forecasts on the published runs, and store it.")
    parser.add_argument("--results", type=Path, default=Path("results"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if bool(args.runs) == args.measure:
        parser.error("name run folders, or use --measure")
    if args.measure:
        print(f"page: {write_measured(args.results)}")
        return 0
    failed, made = False, False
    for folder in args.runs:
        try:
            print("\n".join(map(said, forecast_run(load_run(folder)))))
            made = True
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
    if made:
        print(accuracy_of_forecasts(args.results / "benchmarks" / "forecast.json"))
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
