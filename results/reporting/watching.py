"""What ``python -m results.watch`` shows: the state of every run in a folder, read from what the runs write anyway.

A run that is called running in its manifest may be dead: its process was killed, or its machine. Whoever writes a run's
checkpoints holds a lock on it, and whoever trains adds a line a step. A run whose lock nobody holds and that has been
silent for longer than its steps take is dead. Nothing here writes to a run folder or takes its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import statistics
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.checkpoint.store import LOCK
from core.safe_text.printable import one_line
from core.tracking.console import headline, is_validated, validated_share
from results.reporting.pages import sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

SILENT_S, SILENT_STEPS, STARTING_S = 120.0, 10, 900.0  # a run that loads a large model says nothing for minutes
RECENT = 20  # steps from which the time of the next ones is guessed
ORDER = ("running", "silent", "dead", "unreadable", "failed", "stopped", "finished")
COLOURS = {"running": "green", "silent": "yellow", "dead": "bold red", "unreadable": "red", "failed": "red"}


@dataclass
class Followed:
    """A JSON Lines file that grows: only what was added since the last call is read."""

    path: Path
    offset: int = 0
    rows: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=400))

    def read(self) -> deque[dict[str, Any]]:
        """Return the last rows. A file that shrank was cut back by a resumed run and is read anew."""
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
            if size < self.offset:
                self.offset = 0
                self.rows.clear()
            if size > self.offset:
                with open(self.path, "rb") as file:
                    file.seek(self.offset)
                    added = file.read(size - self.offset)
                whole = added.rfind(b"\n") + 1  # the last line may be half written
                self.offset += whole
                for line in added[:whole].split(b"\n"):
                    with contextlib.suppress(ValueError, RecursionError):
                        if isinstance(row := json.loads(line), dict):
                            self.rows.append(row)
        return self.rows


@dataclass(frozen=True)
class RunState:
    """A run at a moment. ``seconds_left`` is None where nothing says how long it takes."""

    name: str
    state: str
    why: str
    step: int
    total: int | None
    seconds_left: float | None
    silent_s: float
    numbers: Sequence[tuple[str, str]]
    accuracy: Sequence[float]
    health: str
    sample: Mapping[str, Any] | None
    changed: float
    shares: bool = True  # ``accuracy`` is one, and no score that leaves 0 to 1


class WatchedRun:
    """A run folder that is looked at again and again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.metrics = Followed(folder / "metrics.jsonl")
        self.samples = Followed(folder / "samples.jsonl")

    def look(self, now: float) -> RunState:
        """Return the run's state; what cannot be read makes it unreadable, never an exception."""
        name = f"{self.folder.parent.name}/{self.folder.name}"
        try:
            return self._look(name, now)
        except Exception as error:  # whatever the matter is with one run, the others are watched on
            why = f"{type(error).__name__}: {error}"
            return RunState(name, "unreadable", why, 0, None, None, 0.0, (), (), "", None, 0.0)

    def _look(self, name: str, now: float) -> RunState:
        try:
            manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
            status, total = str(manifest["status"]), manifest.get("total_steps")
            total = total if type(total) is int else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"manifest.json: {error}") from error
        rows, samples = [*map(_numbers, self.metrics.read())], self.samples.read()
        last = rows[-1] if rows else {}
        seconds = _step_seconds(rows)
        changed = _last_change(self.folder)
        silent = max(0.0, now - changed)
        state, why = _state(self.folder, status, silent, seconds, bool(rows))
        step = int(last.get("step", 0))
        left = seconds * (total - step) if state in ("running", "silent") and seconds and total else None
        numbers = [(label, f"{value:{form}}") for label, value, form in headline(last)]
        return RunState(
            *(name, state, why or str(manifest.get("stopped_because", "")), step, total, left, silent, numbers),
            *(_accuracy(rows), _health(rows), samples[-1] if samples else None, changed),
            all(validated_share(row, key) for row in rows for key in row if is_validated(key)),
        )


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what is a number in a line of metrics: a damaged value is left out, and the line counts."""
    return {k: v for k, v in row.items() if type(v) in (int, float) and math.isfinite(v)}


def _step_seconds(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the mean seconds of the last steps, checkpoints and validations included; 0 without any."""
    known = [row.get("timing_s/whole", row.get("timing_s/step")) for row in rows if row.get("step")]
    recent = [value for value in known if value is not None][-RECENT:]
    return statistics.fmean(recent) if recent else 0.0


def _last_change(folder: Path) -> float:
    """Return when the run last wrote something, in seconds since the epoch."""
    times = [0.0]
    for name in ("metrics.jsonl", "manifest.json", "samples.jsonl", "validation", "trace", "."):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def _state(folder: Path, status: str, silent: float, seconds: float, began: bool) -> tuple[str, str]:
    """Return the state and why: that of the manifest, or what became of a run that calls itself running."""
    if status != "running":
        return status, ""
    limit = max(SILENT_S, SILENT_STEPS * seconds) if began else STARTING_S
    if silent <= limit:
        return "running", ""
    if holds_lock(folder):
        return "silent", f"its process is there; no line for {duration(silent)}"
    return "dead", f"no process holds it; no line for {duration(silent)}; the same command goes on"


def holds_lock(folder: Path) -> bool:
    """Return whether a process on this machine holds the run's lock, which is asked about and not taken."""
    with contextlib.suppress(OSError), open(folder / LOCK, "rb") as file:
        question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, question)
        return struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK
    return False


def _accuracy(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the mean accuracy over data sources at each validation."""
    found = [[v for k, v in row.items() if is_validated(k)] for row in rows]
    return [statistics.fmean(values) for values in found if values]


def _health(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the last step's health metrics say; '' where all is well, or none was recorded."""
    last = rows[-1] if rows else {}
    said = []
    if crossed := int(last.get("health/crossed_bounds", 0)):
        healthy = last.get("health/last_healthy_step", 0)
        said.append(f"{crossed} bound{'s' * (crossed > 1)} crossed, healthy until step {healthy:.0f}")
    if any(row.get("actor/skipped_updates") for row in list(rows)[-3:]):
        said.append("updates skipped: gradients are not finite")
    return "; ".join(said)


def duration(seconds: float) -> str:
    """Return seconds in the two largest units."""
    whole = int(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Return the run folders: the folders themselves, or those up to two levels below them."""
    found = []
    for folder in folders:
        for pattern in ("manifest.json", "*/manifest.json", "*/*/manifest.json"):
            found += [path.parent for path in folder.glob(pattern) if (path.parent / "metrics.jsonl").exists()]
    return sorted(set(found))


class Watch:
    """All runs below some folders; new ones are found at every look."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.runs: dict[Path, WatchedRun] = {}

    def look(self, now: float | None = None) -> list[RunState]:
        """Return all runs, those that need a person first, the latest of a kind first."""
        now = time.time() if now is None else now
        for path in find_runs(self.folders):
            self.runs.setdefault(path, WatchedRun(path))
        states = [run.look(now) for run in self.runs.values()]
        return sorted(states, key=lambda one: (ORDER.index(one.state) if one.state in ORDER else 0, -one.changed))


# --- one screen ---


def screen(states: Sequence[RunState], width: int, height: int) -> Group:
    """Return all of it for a terminal of this size: what does not fit is counted."""
    from rich.console import Group
    from rich.text import Text

    counts = [f"{sum(one.state == state for one in states)} {state}" for state in ORDER]
    head = Text(" · ".join(count for count in counts if not count.startswith("0 ")) or "no run", style="bold")
    sample = next((one for one in states if one.sample and one.state in ("running", "silent")), None)
    sample = sample or next((one for one in states if one.sample), None)
    below = _sample(sample, width) if sample and height > 16 else []
    room = max(1, height - 6 - len(below))
    table = _table(states[:room], width)
    more = [Text(f"and {len(states) - room} more: name a folder below", style="dim")] if len(states) > room else []
    return Group(head, table, *more, *below)


def _table(states: Sequence[RunState], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    wide = width >= 110
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
    for name in ("run", "state", "step", "left"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=None if name != "run" else 3, min_width=6)
    if wide:
        table.add_column("last step", no_wrap=True, overflow="ellipsis", ratio=4)
    table.add_column("accuracy", no_wrap=True, overflow="ellipsis", ratio=2, min_width=10)
    few = len(states) <= 5  # a reason may take several lines; of many runs each has one
    table.add_column("health", no_wrap=not (wide or few), overflow="ellipsis", ratio=3, min_width=8)
    for one in states:
        share = one.step / one.total if one.total else 0.0
        steps = f"{bar(share)} {one.step}/{one.total}" if one.total else str(one.step)
        line = [Text(one_line(one.name)), Text(one.state, style=COLOURS.get(one.state, "")), Text(steps)]
        line.append(Text(duration(one.seconds_left) if one.seconds_left is not None else ""))
        if wide:
            line.append(Text(" · ".join(f"{label} {value}" for label, value in one.numbers[:4])))
        form = ".1%" if one.shares else ".3g"
        curve = f"{sparkline(one.accuracy)[-12:]} {one.accuracy[-1]:{form}}" if one.accuracy else ""
        problem = one_line(one.why or one.health)
        calm = "ok" if one.state in ("running", "finished") else ""
        line += [Text(curve), Text(problem, style="red") if problem else Text(calm, style="dim")]
        table.add_row(*line)
    return table


def bar(share: float, cells: int = 8) -> str:
    """Return a share as a bar of ``cells`` characters."""
    full = round(min(1.0, share) * cells)
    return "█" * full + "░" * (cells - full)


def _sample(one: RunState, width: int) -> list[Any]:
    """Return the newest answer of a run, a line for each part; control characters of a model reach no terminal."""
    from rich.text import Text

    made = one.sample
    head = one_line(f"last answer of {one.name}, step {made.get('step')}, score {made.get('score')}")
    lines = [Text(f"\n{head}", style="bold")]
    for label, key in (("question", "input"), ("answer", "output"), ("expected", "gts")):
        text = " ".join(str(made.get(key, "")).split())
        shown = one_line(text)
        room = max(20, width - 12)
        lines.append(Text(f"{label:>9}  {shown if len(shown) <= room else '…' + shown[1 - room :]}", no_wrap=True))
    return lines
