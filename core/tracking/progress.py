"""How far work is: a bar on a terminal; in a log a line at most every tenth of the work and every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY_S = 2.0  # what is over sooner needs no bar
PAUSE_S = 30.0  # between two lines of a log


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show ``total`` units of work while the block runs, and yield the function that counts one of them.

    More units than ``total`` are counted without a share: dynamic sampling draws more prompts than a step trains on.
    """
    if not sys.stderr.isatty():
        yield _lines(what, total, unit)
        return
    with tqdm(desc=what, total=total, unit=unit, delay=DELAY_S, leave=False, dynamic_ncols=True) as bar:

        def count() -> None:
            bar.update()

        yield count


def _lines(what: str, total: int, unit: str) -> Callable[[], None]:
    """Return the function that counts one unit, and prints a line where a tenth more is done and a while has passed."""
    done, tenth, said = 0, 0, time.monotonic()

    def count() -> None:
        nonlocal done, tenth, said
        done += 1
        if 10 * done // max(1, total) > tenth and time.monotonic() - said >= PAUSE_S:
            tenth, said = 10 * done // max(1, total), time.monotonic()
            print(f"{what}: {done} of {total} {unit}s", file=sys.stderr, flush=True)

    return count
