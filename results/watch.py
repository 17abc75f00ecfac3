"""One screen of runs while they go on: progress, time left, accuracy, health, the last answer, and runs that are dead.

    python -m results.watch [FOLDER ...] [--every SECONDS] [--once]          FOLDER: outputs/, or some below it

It reads what runs write and changes nothing. Curves are TensorBoard's (``tensorboard --logdir outputs``), a finished
run's report is ``python -m results.report``. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core.errors import InputError
from results.reporting.watching import Watch, screen

NARROWEST = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the runs until a key ends it, or once. Return the exit status: 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m results.watch", description="One screen of the runs in a folder.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="Folders of runs (default: outputs).")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="Look again after so long.")
    parser.add_argument("--once", action="store_true", help="Print the screen once; so it is without a terminal.")
    args = parser.parse_args(arguments)
    folders = args.folders or [Path("outputs")]
    try:
        if args.every <= 0:
            raise InputError(f"--every={args.every:g}: must be above 0; a look costs milliseconds, 2 is a good pace")
        for folder in folders:
            if not folder.is_dir():
                raise InputError(f"{folder}: is no folder; name the one that runs are written to, outputs by default")
        show(Watch(folders), args.every, args.once)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
    return 0


def show(watch: Watch, every: float, once: bool) -> None:
    """Draw the screen, again and again on a terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if once or not console.is_terminal:
        states = watch.look()
        console.print(screen(states, max(NARROWEST, console.width), 6 + len(states) + 10))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(watch.look(), max(NARROWEST, console.width), console.height), refresh=True)
            time.sleep(every)


if __name__ == "__main__":
    sys.exit(main())
