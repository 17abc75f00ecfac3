"""The page of ``python -m results.trace``: the dumps of ``trainer.trace``, token by token.

The page is one file made from ``trace.html.jinja``; nothing is loaded from anywhere, and texts are
escaped. A dump that cannot be read is left out and named on the page. The format is that of
:mod:`core.trace`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import InputError
from core.files import write_atomic
from core.trace import FOLDER
from core.tracking.tracker import step_of
from results.reporting.pages import Block, Link, Text
from results.reporting.run_reader import RecordedRun

HERE = Path(__file__).parent
PAGE = "trace.html"
MOST_TOKENS = 60_000  # of a page whose steps are not named: about 5 MB
HOW = "record some with trainer.trace.freq=20 (every 20 steps, the first and the last)"


def trace_files(run_dir: Path) -> list[Path]:
    """Return the dumps of a run, by step."""
    return sorted((run_dir / FOLDER).glob("step_*.json.gz"))


def read_dump(path: Path) -> dict[str, Any]:
    """Return what a dump holds. Raises InputError where it is damaged."""
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(
            f"{path}: damaged ({error}); leave it out, or record the step again"
        ) from None


def spread_order(count: int) -> list[int]:
    """Return the indices 0 to count - 1 with the first and the last before the middle ones."""
    ends = [0, count - 1] if count > 1 else [0][:count]
    return ends + list(range(1, count - 1))


def chosen_dumps(
    run_dir: Path, steps: Sequence[int] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the dumps of a run to show, by step, and a sentence for each that cannot be read.

    Raises InputError where the run has none, or none of the steps that are named.
    """
    files = trace_files(run_dir)
    if not files:
        raise InputError(f"{run_dir}: no step is recorded; {HOW}")
    if steps is not None:
        recorded = ", ".join(str(step_of(path)) for path in files)
        files = [path for path in files if step_of(path) in steps]
        if not files:
            raise InputError(f"{run_dir}: --steps {steps} are not recorded; choose of {recorded}")
    dumps, notes, tokens = [], [], 0
    for index in spread_order(len(files)):
        try:
            dump = read_dump(files[index])
        except InputError as error:
            notes.append(str(error))
            continue
        tokens += sum(len(t["tokens"]) for group in dump["groups"] for t in group["trajectories"])
        if dumps and steps is None and tokens > MOST_TOKENS:
            notes.append(
                f"{run_dir.name}: some recorded steps are not shown; name them with --steps"
            )
            break
        dumps.append(dump)
    if not dumps:
        raise InputError(f"{run_dir}: no record can be read: {'; '.join(notes)}")
    return sorted(dumps, key=lambda dump: dump["step"]), notes


def write_trace(
    runs: Sequence[Path], out: Path | None = None, steps: Sequence[int] | None = None
) -> tuple[Path, str]:
    """Write the page of these run folders. Return its path, and what it shows in a few words.

    Raises InputError where a folder has no dump that can be read.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    shown, notes = [], []
    for folder in runs:
        dumps, unread = chosen_dumps(folder, steps)
        shown.append((folder.name, dumps))
        notes += unread
    groups = [group for _, dumps in shown for dump in dumps for group in dump["groups"]]
    trajectories = [trajectory for group in groups for trajectory in group["trajectories"]]
    fields = list(dict.fromkeys(name for t in trajectories for name in t["numbers"]))
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["numbers"] = lambda t, index: ",".join(
        str(t["numbers"][name][index]) if name in t["numbers"] else "" for name in fields
    )
    title = "Tokens of " + " and ".join(name for name, _ in shown)
    page = environment.get_template("trace.html.jinja")
    path = out or runs[0] / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.render(title=title, runs=shown, notes=notes, fields=fields) + "\n")
    steps_shown = sum(len(dumps) for _, dumps in shown)
    return path, "\n".join([f"{len(trajectories)} trajectories of {steps_shown} steps", *notes])


def trace_links(runs: Sequence[RecordedRun], out: Path) -> list[Block]:
    """Write a page for the runs that dumped tokens into ``out`` and return a link to it.

    Dumps that cannot be read are a sentence of the report.
    """
    traced = [run.folder for run in runs if trace_files(run.folder)]
    if not traced:
        return []
    try:
        write_trace(traced, out / PAGE)
    except InputError as error:
        return [Text(f"The recorded tokens cannot be shown: {error}")]
    return [
        Link(f"Tokens of recorded steps: {' and '.join(folder.name for folder in traced)}", PAGE)
    ]
