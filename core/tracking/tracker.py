"""The run folder: everything a run leaves behind except its checkpoints.

``<run_dir>/config.yaml`` resolved configuration · ``manifest.json`` the run manifest: provenance and status ·
``metrics.jsonl`` one line a step, on disk before the next step begins · ``samples.jsonl`` a few generations of every
validation · ``validation/<step>.jsonl`` each question's scores · ``trace/`` the tokens of recorded steps.

**Resume.** A run that goes on from the checkpoint of step k keeps the lines up to k and drops the rest, so that its
files end up as those of a run that was never interrupted (``timing_s/`` and ``perf/`` excepted). For that a step is
logged before its checkpoint is complete. TensorBoard purges what follows k as well; wandb keeps the first values it was
sent.

**Metric names** are verl's (``critic/score/mean``, ``actor/pg_loss``, ``response_length/mean``, ``timing_s/gen``, ...),
and the validation names of :mod:`core.tracking.validation`. Not verl's: ``reward/<part>/mean`` and ``collect/*``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from core.config import Config, to_yaml
from core.errors import WriteFailed, unwritten, writing
from core.files import PARTIAL, is_url, upload, write_atomic
from core.tracking import run_manifest
from core.tracking.loggers import LoggedRun, Loggers
from core.tracking.run_manifest import RunFacts
from core.tracking.samples import Row, by_source, spread_out
from core.tracking.validation import ValRecord
from core.types import StepMetrics

log = logging.getLogger(__name__)

ENDINGS = ("finished", "stopped", "failed")
METRICS, SAMPLES, MANIFEST = "metrics.jsonl", "samples.jsonl", "manifest.json"
RUN_FILES = ("config.yaml", MANIFEST, METRICS, SAMPLES, "validation", "tensorboard", "trace")
KEPT_SAMPLES = 50  # generations of each data source that samples.jsonl keeps of a validation, at the least


class Tracker:
    """The owner of the run folder, until :meth:`close` records how the run ended.

    ``resume_step=None`` starts at the beginning (what an earlier run left in the folder moves to ``previous/<n>/``),
    ``resume_step=k`` goes on after step k. Create it once threads are set and data files are known: both are recorded.

    A record that cannot be written is dropped with a warning; a line of metrics waits for the next step.

    Raises:
        WriteFailed: the folder cannot be written.
        ImportError: the package of a logger is not installed.
        InputError: a logger of a new run could not begin, or its class is not where ``trainer.logger`` says.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Config,
        resume_step: int | None = None,
        recipe: str | None = None,
        facts: RunFacts | None = None,
    ) -> None:
        self.run_dir, self.config = Path(run_dir), config
        self._unwritten: list[Row] = []  # lines of metrics that the disk has not taken yet
        with writing(self.run_dir, "the run folder"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _set_aside(self.run_dir)
            else:
                _drop_after(self.run_dir, resume_step)
            self._last_step = max((row["step"] for row in read_jsonl(self.run_dir / METRICS)), default=-1)
            recipe = recipe or self.run_dir.resolve().parent.name
            self.manifest = run_manifest.begun(
                self.run_dir / MANIFEST, config, recipe, resume_step, facts or RunFacts()
            )
            if resume_step and self._last_step < resume_step:
                gap = f"resumed after step {resume_step}, but metrics.jsonl ends at step {max(0, self._last_step)}"
                self.manifest["sessions"][-1]["gap"] = gap
                log.warning("%s: the curves of this run have a hole", gap)
            self._write_manifest()
            write_atomic(self.run_dir / "config.yaml", to_yaml(config))
            (self.run_dir / METRICS).touch()  # a run that ends before its first step has one too
        self._run = LoggedRun(config, self.run_dir, self.manifest["run_id"], resume_step, self.manifest["recipe"])
        try:
            self._loggers = Loggers(self._run)
        except BaseException:
            self._end("failed")
            raise

    def _write_manifest(self) -> None:
        write_atomic(self.run_dir / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")

    def _keep_manifest(self) -> None:
        attempt(self.run_dir / MANIFEST, self._write_manifest, "stays as it is")

    def note(self, name: str, value: Any) -> None:
        """Add a fact about the run to its manifest, which is written when the run ends."""
        self.manifest[name] = value

    def set_total(self, total: int) -> None:
        """Record how many steps the run has: the console shows it, and a report knows that a run ended early."""
        self.manifest["total_steps"] = self._run.total = total
        self._keep_manifest()

    def log(self, metrics: StepMetrics) -> None:
        """Append a step to metrics.jsonl and send it to the loggers. Raises ValueError where steps do not rise."""
        if metrics.step <= self._last_step:
            raise ValueError(f"step {metrics.step} logged after {self._last_step}: each step is logged once, in order")
        self._last_step = metrics.step
        self._unwritten.append({"step": metrics.step, **metrics.values})
        self._append_metrics("waits for the next step")
        self._loggers.log(metrics.step, metrics.values)

    def _append_metrics(self, lost: str) -> None:
        path = self.run_dir / METRICS
        if attempt(path, lambda: append(path, self._unwritten), lost):
            self._unwritten.clear()

    def log_validation(self, step: int, rows: Iterable[ValRecord]) -> None:
        """Keep each question's scores, for intervals and paired comparisons. A repeated step is replaced."""
        self.dump(self.run_dir / "validation", step, [row.to_json() for row in rows])

    def dump(self, folder: str | Path, step: int, rows: Sequence[Row], key: str = "folder") -> None:
        """Write the rows with :func:`dump_jsonl`, where that is possible."""
        attempt(f"{folder}/{step}.jsonl", lambda: dump_jsonl(folder, step, rows, key))

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Keep a few of these generations for the report; trainer.log_val_generations of them go to the loggers.

        ``rows`` are those of :func:`core.tracking.samples.generation_rows`.
        """
        count = self.config.trainer.log_val_generations
        kept = [row for same in by_source(rows).values() for row in spread_out(same, max(count, KEPT_SAMPLES))]
        path = self.run_dir / SAMPLES
        attempt(path, lambda: append(path, [{**row, "step": step} for row in kept]))
        if count:
            self._loggers.samples(step, spread_out(rows, count))

    def close(self, status: str) -> None:
        """End the run: ``finished``, ``stopped`` (by the user) or ``failed``. A second call changes nothing."""
        if status not in ENDINGS:
            raise ValueError(f"status {status!r}: must be one of {', '.join(ENDINGS)}")
        if self.manifest["status"] == "running":
            self._end(status)
            self._loggers.close(status == "failed")

    def _end(self, status: str) -> None:
        self.manifest["status"] = status
        self.manifest["sessions"][-1]["ended"] = run_manifest.now()
        if self._unwritten:  # a last try
            self._append_metrics("is lost")
        self._keep_manifest()


def _set_aside(run_dir: Path) -> None:
    """Move what an earlier run left to ``previous/<n>/``; a new start neither mixes with it nor deletes it."""
    left = [run_dir / name for name in RUN_FILES if (run_dir / name).exists()]
    if left:
        taken = [int(path.name) for path in (run_dir / "previous").glob("[0-9]*") if path.name.isdecimal()]
        target = run_dir / "previous" / str(max(taken, default=0) + 1)
        target.mkdir(parents=True)
        for path in left:
            shutil.move(path, target / path.name)


def _drop_after(run_dir: Path, step: int) -> None:
    """Remove what later steps wrote before the run went back to its checkpoint of ``step``.

    A damaged line is left out with a warning, and the file as it was is kept beside it: a run resumes from its
    checkpoint, not from its records.
    """
    for path in (run_dir / METRICS, run_dir / SAMPLES):
        rows, damaged = intact_rows(path)
        if damaged:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.copyfile(path, aside)
            text = "%s: %d damaged lines (%s) are left out; %s has the file as it was"
            log.warning(text, path, len(damaged), damaged[0], aside.name)
        if path.exists():
            write_atomic(path, "".join(json_line(row) for row in rows if row["step"] <= step))
    for path in (run_dir / "validation").glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) > step:
            path.unlink()
    for path in (run_dir / "trace").glob("step_*"):
        if step_of(path) > step or path.name.endswith(PARTIAL):  # or what a kill left half written
            path.unlink()


# --- JSON lines, and writes that may fail ---


def attempt(path: Path | str, write: Callable[[], Any], lost: str = "is dropped") -> bool:
    """Write a record and return whether it worked: one that cannot be written costs a warning, never the training."""
    try:
        write()
    except (OSError, WriteFailed) as error:
        reason = error if isinstance(error, WriteFailed) else unwritten(error, path, "a record")
        log.warning("%s: it %s, and the run goes on; make room there", reason, lost)
        return False
    return True


def json_line(row: Row) -> str:
    """Return a row as a line. Half a surrogate pair, which no file can hold, is written as an escape."""
    line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(row, default=str) + "\n"
    return line


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add the rows to the file, on disk when this returns. Raises OSError, and leaves no part of a line then."""
    data = memoryview("".join(map(json_line, rows)).encode())
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def dump_jsonl(folder: str | Path, step: int, rows: Iterable[Row], key: str = "folder") -> None:
    """Write ``<folder>/<step>.jsonl``, as verl does for rollout_data_dir and validation_data_dir.

    Raises InputError, which names ``key``, where the folder is a URL that cannot be written.
    """
    name, text = f"{step}.jsonl", "".join(map(json_line, rows))
    if is_url(folder):
        return upload(str(folder), key, name, text.encode())
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomic(Path(folder) / name, text)


def intact_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a file, and for each damaged line its number and what is wrong. No file has neither.

    An incomplete last line, of a process killed in writing it, is neither.
    """
    # Not splitlines: it also splits at U+2028 and the like, which JSON leaves as they are inside an answer.
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            if line and type(row := json.loads(line.decode())) is dict:
                rows.append(row)
            elif line:
                raise ValueError("no mapping")
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                damaged.append(f"line {number}: {type(error).__name__}: {error}")
    return rows, damaged


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; an incomplete last line is left out. Raises ValueError where another is damaged."""
    rows, damaged = intact_rows(path)
    if damaged:
        raise ValueError(f"{path}, {damaged[0]}")
    return rows


def step_of(path: Path) -> int:
    """Return the step of a record named ``step_N``, complete or not; -1 for another name."""
    number = path.name.split(".")[0].removeprefix("step_")
    return int(number) if number.isdecimal() else -1
