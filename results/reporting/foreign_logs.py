"""Logs of other projects as recorded runs: verl's console and file loggers, TRL's ``trainer_state.json``, and CSV.

They hold curves and no records of questions, so that no question can be paired. Names of metrics are mapped by
``foreign_metrics.yaml``. A file in which nothing is recognized is refused: a page without curves would look like a run
that learnt nothing.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from core.errors import InputError
from core.tracking.tracker import read_jsonl
from results.reporting.run_reader import RecordedRun

STEP_COLUMNS = ("step", "Step", "global_step", "_step", "trainer/global_step")  # the last three are wandb's and others'
Lines = Iterator[tuple[int, Mapping[str, Any]]]  # step, metrics by their names there
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CONSOLE = re.compile(r"(?:^|\s)step:(?P<step>\d+) - (?P<metrics>\S.*)")
_CONSOLE_VALUE = re.compile(r"(?:np\.\w+\()?(?P<number>[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\)?", re.IGNORECASE)
_DRAWN = re.compile(r"(critic|actor|reward|response_length|rollout_corr|val-core|val-aux)/.+")


def read_foreign(path: Path, accuracy: str | None = None) -> RecordedRun:
    """Read a log of another project; ``accuracy`` names the metric there that is the held-out accuracy.

    Raises:
        InputError: the file's form is not known, or holds nothing that the table of names maps.
    """
    kind, read = _form(path)
    names = {**_names()[kind], **({accuracy: f"val-core/{kind}/acc/mean@1"} if accuracy else {})}
    by_step: dict[int, dict[str, float]] = {}
    original: set[str] = set()
    for step, metrics in read(path):  # a step that is logged again, after a resume, replaces what it repeats
        row = by_step.setdefault(step, {"step": step})
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                original.add(name)
                row[_ours(name, names)] = value
    _check(path, by_step, original, accuracy)
    rows = [by_step[step] for step in sorted(by_step)]
    return RecordedRun(path, {"foreign.file": str(path)}, _manifest(path, kind), rows, {}, ())


def _check(path: Path, by_step: Mapping[int, Mapping[str, float]], original: set[str], accuracy: str | None) -> None:
    shown = ", ".join(sorted(original)[:8]) or "no number at all"
    if accuracy and accuracy not in original:
        raise InputError(f"--accuracy {accuracy}: {path} has no such metric; it has {shown}")
    if not any(_DRAWN.fullmatch(name) for row in by_step.values() for name in row):
        raise InputError(
            f"{path}: no metric of it is known, it has {shown}; "
            "results/reporting/foreign_metrics.yaml is the table of names, and --accuracy NAME names the accuracy"
        )
    for step, row in sorted(by_step.items()):
        for name, value in row.items():
            if re.fullmatch(r"val-core/.+/acc/.+", name) and not 0 <= value <= 1:
                raise InputError(
                    f"{path}, step {step}: accuracy {value:g} must be a share from 0 to 1; divide percentages by 100"
                )


@cache
def _names() -> Mapping[str, Mapping[str, str]]:
    return yaml.safe_load((Path(__file__).parent / "foreign_metrics.yaml").read_text(encoding="utf-8"))


def _ours(name: str, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    for theirs, ours in names.items():
        head, star, tail = theirs.partition("*")
        if star and name.startswith(head) and name.endswith(tail):
            return ours.replace("*", name[len(head) : len(name) - len(tail)])
    return name


def _manifest(path: Path, kind: str) -> dict[str, Any]:
    """Return a manifest that states what the file does not tell: commit, hardware, seed and the number of steps."""
    stem = path.stem
    if path.name == "trainer_state.json":  # the name of every such file; the run's is a folder's above checkpoint-*
        folder = path.resolve().parent
        stem = folder.parent.name if folder.name.startswith("checkpoint-") else folder.name
    session = {
        "git": {"commit": None, "dirty": False},
        "hardware": {"gpus": []},
        "command": f"read from {path.name}",
        "packages": {},
    }
    return {"recipe": kind, "run": stem, "foreign": kind, "status": "recorded elsewhere", "sessions": [session]}


# --- the forms ---


def _form(path: Path) -> tuple[str, Callable[[Path], Lines]]:
    by_suffix = {".csv": ("csv", _csv), ".json": ("trl", _trainer_state), ".jsonl": ("verl", _file_logger)}
    return by_suffix.get(path.suffix, ("verl", _console))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text ({error}); a log is a text file, .csv, .json or .jsonl") from error


def _console(path: Path) -> Lines:
    """Yield verl's console lines, ``step:1 - actor/entropy:0.5 - ...``, also behind Ray's prefix and colours."""
    found = False
    text = _text(path)
    lines = text.split("\n")[:-1]  # what no line break ends was cut off while it was written, within a number maybe
    for line in lines:
        if match := _CONSOLE.search(_ANSI.sub("", line)):
            parts = (part.rpartition(":") for part in match["metrics"].strip().split(" - "))
            values = {name: number["number"] for name, _, v in parts if (number := _CONSOLE_VALUE.fullmatch(v.strip()))}
            found = found or bool(values)
            yield int(match["step"]), {name: float(value) for name, value in values.items()}
    if not found:
        raise InputError(f"{path}: no line is verl's `step:1 - actor/entropy:0.5 - ...`; name other logs .csv or .json")


def _file_logger(path: Path) -> Lines:
    """Yield the lines of verl's file logger, ``{"step": 1, "data": {...}}``; a cut last line is left out."""
    _text(path)
    try:
        rows = read_jsonl(path)
    except ValueError as error:
        raise InputError(str(error)) from error
    for number, row in enumerate(rows, 1):
        if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("data"), dict)):
            raise InputError(f'{path}, line {number}: must be verl\'s {{"step": 1, "data": {{...}}}}')
        yield row["step"], row["data"]


def _trainer_state(path: Path) -> Lines:
    """Yield TRL's ``log_history``. Its last entry sums up the training and repeats no metric of a step."""
    try:
        history = json.loads(_text(path))["log_history"]
        rows = [(int(entry["step"]), entry) for entry in history]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: must be a trainer_state.json, an object whose log_history lists entries with a step ({error!r})"
        ) from error
    for step, entry in rows:
        yield step, {name: value for name, value in entry.items() if name not in ("step", "epoch", "total_flos")}


def _csv(path: Path) -> Lines:
    reader = csv.DictReader(io.StringIO(_text(path)))
    columns = reader.fieldnames or []
    step = next((name for name in STEP_COLUMNS if name in columns), None)
    if step is None:
        raise InputError(f"{path}: no column is called {' or '.join(STEP_COLUMNS)}; it has {', '.join(columns[:8])}")
    rows = list(reader)
    for number, row in enumerate(rows, 2):
        cut = None in row.values()  # fewer cells than columns: the last line of a file that is still being written
        if cut and number == len(rows) + 1:
            return
        try:
            at = int(float(row[step]))
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}, line {number}: {step} is {row[step]!r} and must be a number") from error
        yield at, {name: value for name in columns if name != step and (value := _number(row[name])) is not None}


def _number(cell: str | None) -> float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return None
