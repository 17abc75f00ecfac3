"""The run folder: everything a run leaves behind except its checkpoints.

``<run_dir>/config.yaml`` resolved configuration · ``manifest.json`` the run manifest: provenance and status ·
``metrics.jsonl`` one line a step, on disk before the next step begins · ``samples.jsonl`` a few generations of every
validation · ``validation/<step>.jsonl`` each question's scores · ``trace/`` the tokens of recorded steps.

**Resume.** A run that goes on from the checkpoint of step k keeps the lines up to k and drops the rest, so that its
files end up as those of a run that was never interrupted (``timing_s/`` and ``perf/`` excepted). For that a step is
logged before its checkpoint is complete. TensorBoard purges what follows k as well; wandb cannot take steps back and
keeps the first values it was sent, MLflow keeps both. A logger that fails is a warning and an entry
``logger_failures`` of the session in ``manifest.json``; the step's line was on disk before.

**Metric names** are verl's: ``critic/{score,rewards,advantages,returns,values}/{mean,max,min}``, ``critic/vf_*``,
``actor/{entropy,pg_loss,kl_loss,ppo_kl,pg_clipfrac,pg_clipfrac_lower,grad_norm,lr}``,
``{response,prompt}_length/{mean,max,min,clip_ratio}``, ``rollout_corr/*``, ``timing_s/{gen,reward,old_log_prob,ref,
values,adv,update_critic,update_actor,save_checkpoint,testing,step}``, ``perf/*``, ``training/{global_step,epoch}``, and
the validation names of :mod:`core.tracking.validation`. Not verl's: ``reward/<part>/mean`` and ``collect/*``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from core.config import Config, convert, registry, to_yaml
from core.config.locations import is_url, write_remote_text
from core.config.plugins import load_object
from core.errors import InputError, writing
from core.files.durable_files import write_atomic
from core.tracking import recorders, run_manifest
from core.tracking.console import ConsoleLogger, headline
from core.tracking.loggers import Guarded, LoggedRun, Logger, Row
from core.tracking.records import Records
from core.tracking.run_manifest import RunFacts
from core.tracking.validation import ValRecord
from core.types import Prompt, StepMetrics

log = logging.getLogger(__name__)

ENDINGS = ("finished", "stopped", "failed")
PICTURES = "pictures.json"  # data_source -> uid -> thumbnails of the questions in samples.jsonl
RUN_FILES = (
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "samples.jsonl",
    PICTURES,
    "validation",
    "tensorboard",
    "trace",
)
STALE = "stays as it is"  # what a manifest does that cannot be written
KEPT_SAMPLES = 50  # generations of each data source that samples.jsonl keeps of a validation, at the least


# --- files ---


def json_line(row: Row) -> str:
    """Return a row as a line. Half a surrogate pair, which no file can hold, is written as an escape."""
    line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(row, default=str) + "\n"
    return line


@dataclass(frozen=True)
class BadLine:
    """A line that is no row: its number from 1, its bytes, and why."""

    number: int
    line: bytes
    why: str


def split_jsonl(path: Path, needs: Callable[[Any], Any] = lambda row: row) -> tuple[list[Any], list[BadLine]]:
    """Return the rows of a file and the lines that are damaged. No file has neither.

    An incomplete last line, of a process killed in writing it, is neither. ``needs`` raises KeyError, TypeError or
    ValueError for a row that is none.
    """
    # Not splitlines: it also splits at U+2028 and the like, which JSON leaves as they are inside an answer.
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                row = json.loads(line.decode())
                needs(row)
                rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):
                damaged.append(BadLine(number, line, f"{type(error).__name__}: {error}"))
    return rows, damaged


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; an incomplete last line, of a process killed in writing it, is left out.

    Raises:
        ValueError: a line before the last one is damaged.
    """
    rows, damaged = split_jsonl(path)
    if damaged:
        raise ValueError(f"{path}, line {damaged[0].number}: not JSON ({damaged[0].why})")
    return rows


def rows_with_steps(path: Path) -> tuple[list[dict[str, Any]], list[BadLine]]:
    """Return the rows of metrics.jsonl or samples.jsonl, and its damaged lines: those that are no row of a step."""

    def needs(row: Any) -> None:
        if type(row) is not dict or type(row["step"]) is not int:
            raise ValueError("no mapping with the number of a step")

    return split_jsonl(path, needs)


def mend_run_folder(run_dir: Path) -> None:
    """Set what is damaged of the run's records aside, with a warning: a run resumes from its checkpoint, not from them.

    Call it before models load. Raises OSError.
    """
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows, damaged = rows_with_steps(run_dir / name)
        if damaged:
            aside = run_dir / f"{name}.damaged"
            with open(aside, "ab") as file:
                file.writelines(bad.line + b"\n" for bad in damaged)
            write_atomic(run_dir / name, "".join(map(json_line, rows)))
            numbers = ", ".join(str(bad.number) for bad in damaged[:5]) + ", ..." * (len(damaged) > 5)
            text = "%s: %d damaged lines (line %s; %s) are set aside in %s; the run resumes without them"
            log.warning(text, run_dir / name, len(damaged), numbers, damaged[0].why, aside.name)
    run_manifest.mend(run_dir / "manifest.json")


def dump_jsonl(folder: str | Path, step: int, rows: Iterable[Row], key: str = "folder") -> None:
    """Write ``<folder>/<step>.jsonl``, as verl does for rollout_data_dir and validation_data_dir.

    Raises InputError, which names ``key``, where the folder is a URL that cannot be written in three tries.
    """
    name, text = f"{step}.jsonl", "".join(map(json_line, rows))
    if is_url(folder):
        return write_remote_text(str(folder), key, name, text)
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def spread_out(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` rows at even distances: the same questions at every validation, from all data sources."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


# --- the tracker ---


class Tracker:
    """The owner of the run folder, until :meth:`close` records how the run ended.

    ``resume_step=None`` starts at the beginning (what an earlier run left in the folder moves to ``previous/<n>/``),
    ``resume_step=k`` goes on after step k. Create it once threads are set and data files are known: both are recorded.
    ``recipe`` is by default the name of the folder that holds the run's.

    What is damaged of a run to resume is set aside. Later a record that cannot be written is dropped with a warning; a
    line of metrics waits for the next step.

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
        self.facts = facts or RunFacts()
        self.run_dir, self.config, self.resume_step = Path(run_dir), config, resume_step
        self.records = Records()
        self._unwritten: list[Row] = []  # lines of metrics that the disk has not taken yet
        with writing(self.run_dir, "the run folder"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _set_aside(self.run_dir)
            else:
                _drop_after(self.run_dir, resume_step)
            self._last_step = max((row["step"] for row in read_jsonl(self.run_dir / "metrics.jsonl")), default=-1)
            self._open_manifest(recipe or self.run_dir.resolve().parent.name)
            write_atomic(self.run_dir / "config.yaml", to_yaml(config))
            (self.run_dir / "metrics.jsonl").touch()  # a run that ends before its first step has one too
        self._console = ConsoleLogger() if "console" in config.trainer.logger else None
        self._loggers: list[Logger] = [self._console] if self._console else []
        self._bar: Any = None
        self._open_loggers()

    def _open_loggers(self) -> None:
        preset = [word for word in shlex.split(self.manifest["sessions"][0]["command"]) if word.startswith("preset=")]
        facts = LoggedRun(
            self.config,
            self.run_dir,
            self.manifest["run_id"],
            self.resume_step,
            recipe=self.manifest["recipe"],
            preset=preset[-1].removeprefix("preset=") if preset else "",
        )
        for name in dict.fromkeys(self.config.trainer.logger):
            function = registry.logger(name).function
            if function is None:
                continue
            try:
                self._loggers.append(Guarded(name, load_object(function, "trainer.logger")(facts), self._note_logger))
            except (ImportError, InputError):  # wrong whenever it is tried, unlike a service that is away
                raise
            except Exception as error:
                self._without_logger(name, error)

    def _without_logger(self, name: str, error: Exception) -> None:
        """Refuse to begin without a logger that was requested; a run that is resumed goes on without it."""
        reason = f"could not begin ({type(error).__name__}: {error})"
        if self.resume_step is None:
            self.close("failed")
            fix = "mend its login or address, or leave it out: metrics.jsonl is written anyway"
            raise InputError(f"trainer.logger={name}: {reason}; {fix}") from error
        print(f"warning: trainer.logger={name}: {reason}; the resumed run goes on without it", file=sys.stderr)
        self._note_logger(name, reason)

    def _note_logger(self, name: str, reason: str) -> None:
        self.manifest["sessions"][-1].setdefault("logger_failures", {})[name] = reason
        self._keep_manifest()

    def _open_manifest(self, recipe: str) -> None:
        path, name = self.run_dir / "manifest.json", self.run_dir.resolve().name
        manifest = {"run": name, "recipe": recipe, "run_id": secrets.token_hex(4), "sessions": []}
        if path.exists():
            manifest = run_manifest.read(path)
        elif self.resume_step is not None:
            manifest |= run_manifest.rebuilt(path)
        values = convert.flat(self.config).items()
        manifest["status"] = "running"
        manifest.pop("stopped_because", None)
        manifest["seeds"] = {key: value for key, value in values if key in ("trainer.seed", "data.seed")}
        manifest["changed_from_defaults"] = run_manifest.changed_keys(self.config, manifest["recipe"])
        manifest["data"] = run_manifest.data_of(self.config)
        manifest["models"] = self.facts.bases()
        manifest["sessions"].append(run_manifest.session(self.resume_step, self.facts.changes))
        if self.resume_step and self._last_step < self.resume_step:
            gap = f"resumed after step {self.resume_step}, but metrics.jsonl ends at step {max(0, self._last_step)}"
            manifest["sessions"][-1]["gap"] = gap
            print(f"warning: {gap}: the curves of this run have a hole", file=sys.stderr)
        self.manifest = manifest
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_atomic(self.run_dir / "manifest.json", json.dumps(self.manifest, indent=1) + "\n")

    def _keep_manifest(self) -> bool:
        return self.records.attempt("manifest.json", self.run_dir / "manifest.json", self._write_manifest, STALE)

    def note(self, name: str, value: Any) -> None:
        """Add a fact about the run to its manifest, which is written when the run ends."""
        self.manifest[name] = value

    def progress(self, total: int) -> None:
        """Show a bar on a terminal (step, reward, length, time left) and ``step/total`` on the console.

        ``total`` also goes into the manifest, from which a report knows that a run ended early.
        """
        self.manifest["total_steps"] = total
        self._keep_manifest()
        if self._console:
            self._console.total = total
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=self.resume_step or 0, unit="step", dynamic_ncols=True)

    def log(self, metrics: StepMetrics) -> None:
        """Write the step's line to disk, then pass it to the loggers. Steps must rise."""
        if metrics.step <= self._last_step:
            raise ValueError(f"step {metrics.step} logged after {self._last_step}: a step is logged once, in order")
        path = self.run_dir / "metrics.jsonl"
        self._unwritten.append({"step": metrics.step, **metrics.values})
        if self.records.attempt(path.name, path, lambda: _append(path, self._unwritten), "waits for the next step"):
            self._unwritten.clear()
        self._last_step = metrics.step
        for logger in self._loggers:
            logger.log(metrics.step, metrics.values)
        if self._bar is not None:
            shown = {label: f"{value:{form}}" for label, value, form in headline(metrics.values)}
            self._bar.set_postfix({k: v for k, v in shown.items() if k in ("reward", "length")}, refresh=False)
            self._bar.update(metrics.step - self._bar.n)

    def log_validation(self, step: int, records: Iterable[ValRecord]) -> None:
        """Keep each question's scores, for intervals and paired comparisons. A repeated step is replaced."""
        self.dump(self.run_dir / "validation", step, [record.to_json() for record in records])

    def dump(self, folder: str | Path, step: int, rows: Sequence[Row], key: str = "folder") -> None:
        """Write the rows with :func:`dump_jsonl`, where that is possible."""
        path = f"{folder}/{step}.jsonl"
        self.records.attempt(Path(folder).name, path, lambda: dump_jsonl(folder, step, rows, key))

    def log_samples(self, step: int, rows: Sequence[Row], prompts: Iterable[Prompt] = ()) -> None:
        """Keep a few of these generations for the report; trainer.log_val_generations of them go to the loggers.

        ``rows`` are those of :func:`core.tracking.generations.generation_rows`, ``prompts`` the questions, of whose
        media the report shows thumbnails.
        """
        count = self.config.trainer.log_val_generations
        by_source: dict[Any, list[Row]] = {}
        for row in rows:
            by_source.setdefault(row.get("data_source"), []).append(row)
        samples = [row for same in by_source.values() for row in spread_out(same, max(count, KEPT_SAMPLES))]
        path, rows_kept = self.run_dir / "samples.jsonl", [{**row, "step": step} for row in samples]
        self.records.attempt(path.name, path, lambda: _append(path, rows_kept))
        media = {(prompt.data_source, prompt.uid): prompt.media for prompt in prompts if prompt.media}
        of_kept = ((row.get("data_source"), row.get("uid")) for row in samples)
        if shown := {question: media[question] for question in of_kept if question in media}:
            from core.vision.thumbnails import keep_thumbnails

            file = self.run_dir / PICTURES
            self.records.attempt(PICTURES, file, lambda: keep_thumbnails(file, shown))
        if count:
            for logger in self._loggers:
                logger.samples(step, spread_out(rows, count))

    def close(self, status: str) -> None:
        """End the run: ``finished``, ``stopped`` (by the user) or ``failed``. A second call changes nothing."""
        if status not in ENDINGS:
            raise ValueError(f"status {status!r}: must be one of {', '.join(ENDINGS)}")
        if self.manifest["status"] != "running":
            return
        self.manifest["status"] = status
        self.manifest["sessions"][-1]["ended"] = run_manifest.now()
        if self._unwritten:  # a last try
            path = self.run_dir / "metrics.jsonl"
            self.records.attempt(path.name, path, lambda: _append(path, self._unwritten), "is lost")
        if self.records.dropped:
            self.manifest["sessions"][-1]["records_dropped"] = dict(self.records.dropped)
        if not self._keep_manifest():
            run_manifest.put_status(self.run_dir / "manifest.json", status)
        if self._bar is not None:
            self._bar.close()
        for logger in self._loggers:
            logger.close(status == "failed")


def _append(path: Path, rows: Iterable[Row]) -> None:
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
    """Remove what later steps wrote before the run went back to its checkpoint of ``step``."""
    mend_run_folder(run_dir)
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (run_dir / name).exists():
            rows = [json_line(row) for row in read_jsonl(run_dir / name) if row["step"] <= step]
            write_atomic(run_dir / name, "".join(rows))
    for path in (run_dir / "validation").glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) > step:
            path.unlink()
    recorders.drop_after(run_dir, step)
