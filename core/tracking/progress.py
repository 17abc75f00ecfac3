"""A progress bar for work that takes more than two seconds, on a terminal only: a log holds lines, no bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY_S = 2.0  # what is over sooner needs no bar


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show a bar of ``total`` units while the block runs, and yield the function that counts one of them.

    More units than ``total`` are counted without a share: dynamic sampling draws more prompts than a step trains on.
    """
    with tqdm(desc=what, total=total, unit=unit, disable=None, delay=DELAY_S, leave=False, dynamic_ncols=True) as bar:

        def count() -> None:
            bar.update()

        yield count
