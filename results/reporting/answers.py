"""The texts of validation answers that a run kept, and which of them its published copy keeps.

A run keeps some answers of every validation in ``samples.jsonl``. Scores of all questions are in
:class:`results.reporting.run_reader.RecordedRun`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.reporting.run_reader import RecordedRun, scrub

Row = Mapping[str, Any]
PUBLISHED = ("step", "uid", "data_source", "input", "output", "gts", "pred", "stop", "acc", "score")
# Of a question or an answer, half from each end: a set of long answers stays small
PUBLISHED_CHARACTERS = 4_000
# Folders in which machines keep what is theirs. Not any path: an answer's "</think>" and "km/h" are
# none.
_MACHINE_FOLDERS = (
    r"~|/(?:data|gpfs|home|lustre|media|mnt|net|nfs|opt|private|proc|root|scratch|srv|storage|tmp|Users|usr|var|work"
    r"|workspace)"
)


@dataclass(frozen=True)
class Flip:
    """A question whose accuracy differs between two evaluations, ``a`` and ``b``."""

    uid: str
    a: float
    b: float


def flips(a_by_uid: Mapping[str, float], b_by_uid: Mapping[str, float]) -> list[Flip]:
    """Return the questions that differ, the largest differences first, those that got worse before
    those that rose.

    Ties are in the order of a hash of the uid, the same in all runs: what several runs keep of them
    then overlaps.
    """
    found = [
        Flip(uid, a, b_by_uid[uid]) for uid, a in a_by_uid.items() if b_by_uid.get(uid, a) != a
    ]
    return sorted(found, key=lambda flip: (flip.b > flip.a, -abs(flip.b - flip.a), _hash(flip.uid)))


def _hash(uid: str) -> str:
    return hashlib.sha256(uid.encode()).hexdigest()


def answers(
    run: RecordedRun, step: int, source: str, uids: Iterable[str] | None = None
) -> dict[str, Row]:
    """Return ``uid -> row`` of the first answer to each question whose text was kept; ``uids``
    None: all of them."""
    wanted = None if uids is None else set(uids)
    rows: dict[str, Row] = {}
    for row in run.samples:
        uid = row.get("uid")
        if (
            row["step"] == step
            and row.get("data_source", source) == source
            and (wanted is None or uid in wanted)
        ):
            rows.setdefault(uid, row)
    return rows


def published_samples(run: RecordedRun, count: int) -> Iterator[dict[str, Any]]:
    """Yield about ``count`` questions of each data source with their first and their last answer,
    both scrubbed.

    Questions that flipped come first and have two thirds of the places: half of them for right to
    wrong, the other for wrong to right. Then come those that stayed wrong.
    """
    steps = sorted({row["step"] for row in run.samples})
    if not steps:
        return
    first, last = steps[0], steps[-1]
    names = dict.fromkeys(row.get("data_source") for row in run.samples)
    sources = [*run.accuracy_at(last)] if None in names else [*names]
    paths = _machine_paths(run)
    for source in sources or [""]:
        kept = {step: answers(run, step, source) for step in (first, last)}
        shared = [uid for uid in kept[last] if uid in kept[first]]
        for uid in _chosen(run, source, (first, last), shared, count):
            for step in dict.fromkeys((first, last)):
                row = kept[step][uid]
                yield {
                    name: _shortened(scrub(row[name], paths)) for name in PUBLISHED if name in row
                }


def _chosen(
    run: RecordedRun, source: str, steps: tuple[int, int], uids: Sequence[str], count: int
) -> list[str]:
    accuracy = [run.accuracy_at(step).get(source, {}) for step in steps]
    before, after = ({uid: each[uid] for uid in uids if uid in each} for each in accuracy)
    found = flips(before, after)
    worse, better = (
        [flip.uid for flip in found if (flip.b > flip.a) is rose] for rose in (False, True)
    )
    places = count - count // 3
    flipped = [*worse[: max(places // 2, places - len(better))], *better][:places]
    # What stayed wrong here another run may have learnt: the two then differ in it, and both texts
    # are kept.
    same = sorted(
        (uid for uid in uids if uid not in flipped),
        key=lambda uid: (after.get(uid, 0.0) > 0, _hash(uid)),
    )
    return [*flipped, *same][:count]


def _machine_paths(run: RecordedRun) -> re.Pattern[str]:
    """Return what matches paths of this machine in a text: its usual folders, and those that the
    run names."""
    named = {str(Path.home()), os.getcwd(), str(run.folder.resolve().parent)}
    for value in run.config.values():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text.startswith("/"):
                named.add(str(Path(text).parent))
    own = "|".join(
        re.escape(one) for one in sorted(named, key=len, reverse=True) if one.count("/") > 1
    )
    rest = r"(?:/[^\s'\"=,:;\[\](){}<>/]+)"
    return re.compile(
        rf"(?<![\w/.<])(?:(?:{own or '(?!)'}){rest}*|(?:{_MACHINE_FOLDERS}){rest}+)/?"
    )


def _shortened(value: Any) -> Any:
    half = PUBLISHED_CHARACTERS // 2
    if not isinstance(value, str) or len(value) <= PUBLISHED_CHARACTERS:
        return value
    return f"{value[:half]} […] {value[-half:]}"
