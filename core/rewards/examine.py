"""A few answers in full, as the run makes them: ``reward_model.num_examine`` and ``val_num_examine``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


def examined(rows: Iterable[Mapping[str, Any]], count: int) -> str:
    """The first ``count`` answers of each data source, under the headings that verl's managers print.

    ``rows`` are those of :func:`core.tracking.tracker.generation_row`.
    """
    lines, seen = [], Counter()
    for row in rows if count else ():
        source = row["data_source"]
        seen[source] += 1
        if seen[source] <= count:
            lines += [f"[prompt] {row['input']}", f"[response] {row['output']}", f"[ground_truth] {row['gts']}"]
            lines += [f"[score] {row['score']:g}"]
    return "\n".join(lines)
