"""The texts of validation answers: which of them a run kept, and which of them its published copy keeps.

A run keeps some answers of every validation in ``samples.jsonl``, and all of them where ``trainer.validation_data_dir``
names a folder. Scores of all questions are in :mod:`results.reporting.run_reader`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.tracking.run_manifest import ROOT
from results.reporting.run_reader import RecordedRun

Row = Mapping[str, Any]
PUBLISHED = ("step", "uid", "data_source", "input", "output", "gts", "pred", "stop", "acc", "score")
PUBLISHED_CHARACTERS = 4_000  # of a question or an answer, half from each end: a set of long answers stays small
# Folders in which machines keep what is theirs. Not any path: an answer's "</think>" and "km/h" are none.
_MACHINE_PATH = re.compile(
    r"(?<![\w/.<])(?:~|/(?:data|gpfs|home|lustre|media|mnt|net|nfs|opt|private|proc|root|scratch|srv|storage|tmp|Users"
    r"|usr|var|work|workspace))(?:/[^\s'\"=,:;\[\](){}<>/]+)+/?"
)


@dataclass(frozen=True)
class Flip:
    """A question whose accuracy differs between two evaluations, ``a`` and ``b``."""

    uid: str
    a: float
    b: float


def flips(a_by_uid: Mapping[str, float], b_by_uid: Mapping[str, float]) -> list[Flip]:
    """Return the questions that differ, the largest differences first, those that got worse before those that rose.

    Ties are in the order of a hash of the uid, the same in all runs: what several runs keep of them then overlaps.
    """
    found = [Flip(uid, a, b_by_uid[uid]) for uid, a in a_by_uid.items() if b_by_uid.get(uid, a) != a]
    return sorted(found, key=lambda flip: (flip.b > flip.a, -abs(flip.b - flip.a), _hash(flip.uid)))


def _hash(uid: str) -> str:
    return hashlib.sha256(uid.encode()).hexdigest()


# --- the texts of a run ---


def answers(run: RecordedRun, step: int, source: str, uids: Iterable[str] | None = None) -> dict[str, Row]:
    """Return ``uid -> row`` of the first answer to each question whose text was kept; ``uids`` None: all of them."""
    wanted = None if uids is None else set(uids)
    if (found := _dumped(run, step, source, wanted)) is not None:
        return found
    rows: dict[str, Row] = {}
    for row in run.samples:
        uid = row.get("uid")
        if row["step"] == step and row.get("data_source", source) == source and (wanted is None or uid in wanted):
            rows.setdefault(uid, row)
    return rows


def _dumped(run: RecordedRun, step: int, source: str, wanted: set[str] | None) -> dict[str, Row] | None:
    """Return the rows of ``trainer.validation_data_dir``; None where they are absent or another run's."""
    folder = run.config.get("trainer.validation_data_dir")
    path = Path(str(folder)) / f"{step}.jsonl"
    if not folder or run.is_published or not path.exists():
        return None
    accuracy = run.accuracy_at(step).get(source, {})
    rows: dict[str, list[Row]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row.get("data_source") == source and (wanted is None or row.get("uid") in wanted):
                rows.setdefault(row["uid"], []).append(row)
    for uid, same in rows.items():
        # Several runs may have written into one folder. The scores tell whose answers are there.
        if uid not in accuracy or abs(statistics.fmean(row.get("acc", -1.0) for row in same) - accuracy[uid]) > 1e-9:
            return None
    return {uid: same[0] for uid, same in rows.items()}


# --- what is published ---


def published_samples(run: RecordedRun, count: int) -> Iterator[dict[str, Any]]:
    """Yield about ``count`` questions of each data source with their first and their last answer, both scrubbed.

    Questions that flipped come first and have two thirds of the places: half of them for right to wrong, the other for
    wrong to right. Then come those that stayed wrong.
    """
    steps = sorted({row["step"] for row in run.samples})
    if not steps:
        return
    clean = _scrubber(run)
    first, last = steps[0], steps[-1]
    names = dict.fromkeys(row.get("data_source") for row in run.samples)
    sources = [*run.accuracy_at(last)] if None in names else [*names]
    for source in sources or [""]:
        kept = {step: answers(run, step, source) for step in (first, last)}
        shared = [uid for uid in kept[last] if uid in kept[first]]
        for uid in _chosen(run, source, (first, last), shared, count):
            for step in dict.fromkeys((first, last)):
                row = kept[step][uid]
                yield {name: clean(row[name]) for name in PUBLISHED if name in row}


def _chosen(run: RecordedRun, source: str, steps: tuple[int, int], uids: Sequence[str], count: int) -> list[str]:
    accuracy = [run.accuracy_at(step).get(source, {}) for step in steps]
    before, after = ({uid: each[uid] for uid in uids if uid in each} for each in accuracy)
    found = flips(before, after)
    worse, better = ([flip.uid for flip in found if (flip.b > flip.a) is rose] for rose in (False, True))
    places = count - count // 3
    flipped = [*worse[: max(places // 2, places - len(better))], *better][:places]
    # What stayed wrong here another run may have learnt: the two then differ in it, and both texts are kept.
    same = sorted((uid for uid in uids if uid not in flipped), key=lambda uid: (after.get(uid, 0.0) > 0, _hash(uid)))
    return [*flipped, *same][:count]


def _scrubber(run: RecordedRun):
    """Return the function that takes machine paths and the host's name out of a value and shortens long texts."""
    known = {str(ROOT), str(Path.home()), os.getcwd(), str(run.folder.resolve().parent)}
    for value in run.config.values():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text.startswith("/"):
                known.add(str(Path(text).parent))
    roots = sorted((root for root in known if root.count("/") > 1), key=len, reverse=True)
    own = re.compile("|".join(rf"{re.escape(root)}(?:/[^\s'\"=,:;\[\](){{}}<>]*)?" for root in roots) or r"(?!)")
    host = socket.gethostname()

    def hidden(match: re.Match[str]) -> str:
        path = match[0].rstrip("/")
        return f"<path>/{Path(path).name}" if path.count("/") > 2 else "<path>"

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        if not isinstance(value, str):
            return value
        text = _MACHINE_PATH.sub(hidden, own.sub(hidden, value))
        text = re.sub(rf"\b{re.escape(host)}\b", "<host>", text) if len(host) > 3 else text
        half = PUBLISHED_CHARACTERS // 2
        return text if len(text) <= PUBLISHED_CHARACTERS else f"{text[:half]} […] {text[-half:]}"

    return clean
