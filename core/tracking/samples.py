"""Generations as rows under verl's field names: what is dumped, sampled for the report, and printed."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from core.errors import printable
from core.tracking.records import Row

if TYPE_CHECKING:
    from core.types import ScoredGroup


def generation_rows(step: int, groups: Sequence[ScoredGroup], tokenizer: Any) -> list[dict[str, Any]]:
    """Return one row a trajectory; ``output`` is the whole response, tool text included."""
    rows = []
    for group in groups:
        prompt = group.prompt
        # one placeholder a picture: a reader sees the picture, or none of its tokens
        text = tokenizer.decode(prompt.media.collapse(prompt.token_ids) if prompt.media else prompt.token_ids)
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            output = "".join(segment.text for segment in trajectory.segments)
            named = {"uid": prompt.uid, "data_source": prompt.data_source, "pred": score.pred}
            named |= {"stop": trajectory.stop.value, "input": text, "output": output, "gts": prompt.ground_truth}
            rows.append(
                {**score.notes, **score.parts, **named, "score": score.value, "step": step, "ordinal": prompt.ordinal}
            )
    return rows


def print_examples(rows: Iterable[Mapping[str, Any]], count: int) -> None:
    """Print the first ``count`` answers of each data source, under the headings that verl's managers print."""
    seen: Counter[str] = Counter()
    for row in rows if count else ():
        seen[row["data_source"]] += 1
        if seen[row["data_source"]] <= count:
            shown = f"[prompt] {row['input']}\n[response] {row['output']}\n[ground_truth] {row['gts']}"
            tqdm.write(printable(shown))  # above the bar of the run, where it has one
            tqdm.write(f"[score] {row['score']:g}")
            sys.stdout.flush()


def spread_out(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` rows at even distances: the same questions at every validation."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def of_each_source(rows: Iterable[Row], count: int) -> list[Row]:
    """Return at most ``count`` rows of each data source."""
    by_source: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.get("data_source")].append(row)
    return [row for same in by_source.values() for row in spread_out(same, count)]
