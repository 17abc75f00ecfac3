"""The page of recorded tokens: the answers of dumped steps, token by token.

    python -m results.trace RUN [RUN ...] [--steps 1,20] [--out FILE]

A RUN is a run folder (``outputs/<recipe>/<run>``) that was trained with ``trainer.trace.freq`` or
``trainer.trace.steps``. The page is ``<run>/trace.html``: one file that needs no network. Without
``--steps`` it shows the first and the last dumped step of each run, and those between that its size
allows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from core.errors import InputError, printable
from core.files import written_here
from results.reporting.run_reader import run_copy
from results.reporting.trace_page import PAGE, write_trace


def _steps(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: name steps by numbers and commas, as in 1,20"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line names and return the exit status: 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m results.trace", description="Every token of dumped steps."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run folders, or their URLs.")
    parser.add_argument(
        "--steps", type=_steps, metavar="N,N", help="The steps to show (default: some of all)."
    )
    parser.add_argument(
        "--out",
        type=written_here,
        metavar="FILE",
        help=f"The page (default: {PAGE} in the first run's folder).",
    )
    args = parser.parse_args(arguments)
    try:
        path, shown = write_trace([run_copy(run) for run in args.runs], args.out, args.steps)
    except InputError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    print(printable(f"{shown}\npage: {path}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
