"""What a person sees of a run while it goes on: how far work is, and some of the answers."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from core.errors import printable

if TYPE_CHECKING:
    from core.types import ScoredGroup

Row = Mapping[str, Any]
DELAY_S = 2.0  # what is over sooner needs no bar
PAUSE_S = 10.0  # between two lines of a log


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show ``total`` units of work while the block runs, and yield the function that counts one of them.

    A terminal has a bar, a log a line at most every tenth of the work and every ten seconds. More units than
    ``total`` are counted: dynamic sampling draws more prompts than a step trains on.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=what, total=total, unit=unit, delay=DELAY_S, leave=False, dynamic_ncols=True) as bar:
            yield lambda: bar.update() and None
        return
    done, tenth, printed = 0, 0, time.monotonic()

    def count() -> None:
        nonlocal done, tenth, printed
        done += 1
        if 10 * done // max(1, total) > tenth and time.monotonic() - printed >= PAUSE_S:
            tenth, printed = 10 * done // max(1, total), time.monotonic()
            print(f"{what}: {done} of {total} {unit}s", file=sys.stderr, flush=True)

    yield count


def generation_rows(step: int, groups: Sequence[ScoredGroup], tokenizer: Any) -> list[dict[str, Any]]:
    """Return one row a trajectory, under verl's names; ``output`` is the whole response, tool text included."""
    rows = []
    for group in groups:
        prompt = group.prompt
        # one placeholder a picture: a reader sees the picture, or none of its tokens
        text = tokenizer.decode(prompt.media.collapse(prompt.token_ids) if prompt.media else prompt.token_ids)
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            rows.append(
                {
                    **score.notes,
                    **score.parts,
                    "uid": prompt.uid,
                    "data_source": prompt.data_source,
                    "pred": score.pred,
                    "stop": trajectory.stop.value,
                    "input": text,
                    "output": "".join(segment.text for segment in trajectory.segments),
                    "gts": prompt.ground_truth,
                    "score": score.value,
                    "step": step,
                    "ordinal": prompt.ordinal,
                }
            )
    return rows


def print_examples(rows: Iterable[Row], count: int) -> None:
    """Print the first ``count`` answers of each data source, under the headings that verl's managers print."""
    from tqdm import tqdm

    for same in by_source(rows).values() if count else ():
        for row in same[:count]:
            shown = f"[prompt] {row['input']}\n[response] {row['output']}\n[ground_truth] {row['gts']}"
            tqdm.write(f"{printable(shown)}\n[score] {row['score']:g}")  # above the bar of the run, where it has one
            sys.stdout.flush()


def by_source(rows: Iterable[Row]) -> dict[Any, list[Row]]:
    """Return the rows of each data source."""
    found: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.get("data_source")].append(row)
    return found


def spread_out(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` rows at even distances: the same questions at every validation."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]
