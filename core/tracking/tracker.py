"""The run folder: everything a run leaves behind except its checkpoints.

``metrics.jsonl`` has a line a step, on disk before the next step begins, under verl's names;
``samples.jsonl`` a few answers of every validation, ``validation/<step>.jsonl`` each question's
scores, ``trace/`` the tokens of recorded steps. A run that resumes from step k keeps what they hold
up to k and drops the rest, so that they end up as those of a run that was never interrupted
(``timing_s/`` and ``perf/`` excepted).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config import Config, to_yaml
from core.config.paths import recipe_of, run_folder
from core.errors import WriteFailed, write_failed, writing
from core.files import PARTIAL, is_url, upload, write_atomic
from core.tracking import run_manifest
from core.tracking.json_lines import append, intact_rows, json_line, read_jsonl
from core.tracking.loggers import Loggers, print_examples
from core.types import ScoredGroup, StepMetrics

if TYPE_CHECKING:
    from core.tracking.validation import ValRecord

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
METRICS, SAMPLES, MANIFEST = "metrics.jsonl", "samples.jsonl", "manifest.json"
RUN_FILES = ("config.yaml", MANIFEST, METRICS, SAMPLES, "validation", "tensorboard", "trace")
# Answers of each data source in samples.jsonl: of a validation, of the last one
KEPT_SAMPLES, KEPT_LAST = 50, 5_000


class Tracker:
    """The owner of the run folder, until :meth:`close` records how the run ended.

    ``resume_step=None`` starts at the beginning (what an earlier run left in the folder moves to
    ``previous/<n>/``), ``resume_step=k`` goes on after step k. A record that cannot be written is
    dropped with a warning; a line of metrics waits for the next step. Raises WriteFailed where the
    folder cannot be written, and what :class:`Loggers` raises.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Config,
        resume_step: int | None = None,
        recipe: str | None = None,
        models: Mapping[str, Any] | None = None,
        changes: run_manifest.Changes | None = None,
    ) -> None:
        self.run_dir, self.config, self.resume_step = Path(run_dir), config, resume_step
        self._began_in = Path.cwd()  # a scorer may change it
        self._unwritten: list[Row] = []  # lines of metrics that the disk has not taken yet
        with writing(self.run_dir, "the run folder"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _set_aside(self.run_dir)
            else:
                _drop_after(self.run_dir, resume_step)
            self.last_step = max(
                (row["step"] for row in read_jsonl(self.run_dir / METRICS)), default=-1
            )
            recipe = recipe or recipe_of(config, self.run_dir)
            known = models or {}, changes or {}
            self.manifest = run_manifest.begun(
                self.run_dir / MANIFEST, config, recipe, resume_step, *known
            )
            self._write_manifest()
            write_atomic(self.run_dir / "config.yaml", to_yaml(config))
            (self.run_dir / METRICS).touch()  # a run that ends before its first step has one too
        try:
            self._loggers = Loggers(self)
        except BaseException:
            self._end("failed")
            raise

    def _write_manifest(self) -> None:
        write_atomic(self.run_dir / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")

    def set_total(self, total: int) -> None:
        """Record how many steps the run has: the console shows it, and a report knows that a run
        ended early."""
        self.manifest["total_steps"] = total
        attempt(self.run_dir / MANIFEST, self._write_manifest)

    def log(self, metrics: StepMetrics) -> None:
        """Append a step to metrics.jsonl and send it to the loggers. Raises ValueError where steps
        do not rise."""
        if metrics.step <= self.last_step:
            raise ValueError(
                f"step {metrics.step} logged after {self.last_step}: each step is "
                f"logged once, in order"
            )
        self.last_step = metrics.step
        self._unwritten.append({"step": metrics.step, **metrics.values})
        if attempt(self.run_dir / METRICS, lambda: append(self.run_dir / METRICS, self._unwritten)):
            self._unwritten.clear()
        self._loggers.call("log", metrics.step, metrics.values)

    def amend(self, metrics: StepMetrics) -> None:
        """Add numbers to the last line of metrics.jsonl, which is of their step, and send them to
        the loggers."""
        rows, _ = intact_rows(self.run_dir / METRICS)
        rows[-1] |= metrics.values
        text = "".join(map(json_line, rows))
        attempt(self.run_dir / METRICS, lambda: write_atomic(self.run_dir / METRICS, text))
        self._loggers.call("log", metrics.step, metrics.values)

    def has_validation(self, step: int) -> bool:
        """Return whether the scores of a validation after this step are kept."""
        return (self.run_dir / "validation" / f"{step}.jsonl").exists()

    def log_validation(self, step: int, records: Iterable[ValRecord]) -> None:
        """Keep each question's scores, for intervals and paired comparisons. A repeated step is
        replaced."""
        self.dump(self.run_dir / "validation", step, [record.to_json() for record in records])

    def dump(self, folder: str | Path, step: int, rows: Sequence[Row], key: str = "folder") -> None:
        """Write ``<folder>/<step>.jsonl``, as verl does; ``key`` is that of a folder that may be a
        URL."""
        name, text = f"{step}.jsonl", "".join(map(json_line, rows))

        def write() -> None:
            if is_url(folder):
                return upload(str(folder), key, name, text.encode())
            here = self._began_in / os.path.expanduser(folder)
            here.mkdir(parents=True, exist_ok=True)
            write_atomic(here / name, text)

        attempt(f"{folder}/{name}", write)

    def show(self, step: int, rows: Sequence[Row], printed: int, key: str) -> None:
        """Print the first ``printed`` rows of each data source; write all where ``trainer.<key>``
        names a folder."""
        print_examples(rows, printed)
        if folder := getattr(self.config.trainer, key):
            self.dump(folder, step, rows, f"trainer.{key}")

    def log_samples(self, step: int, rows: Sequence[Row], last: bool = False) -> None:
        """Keep some of these :func:`generation_rows` of each data source, the same questions every
        time."""
        by_source = defaultdict(list)
        for row in rows:
            by_source[row.get("data_source")].append({**row, "step": step})
        most = KEPT_LAST if last else KEPT_SAMPLES
        kept = [row for same in by_source.values() for row in spread_out(same, most)]
        attempt(self.run_dir / SAMPLES, lambda: append(self.run_dir / SAMPLES, kept))

    def close(self, status: str) -> None:
        """End the run: ``finished``, ``stopped`` (by the user) or ``failed``. A second call changes
        nothing."""
        if self.manifest["status"] == "running":
            self._end(status)
            self._loggers.call("close", status == "failed")

    def _end(self, status: str) -> None:
        self.manifest["status"] = status
        self.manifest["sessions"][-1]["ended"] = run_manifest.now()
        attempt(self.run_dir / MANIFEST, self._write_manifest)


def folder_problem(config: Config) -> str | None:
    """Return what is wrong with a run folder that is not there yet, or that no run wrote."""
    key, text = "trainer.default_local_dir", config.trainer.default_local_dir
    fix = "name a folder of the run's own, or leave it out for outputs/<recipe>/<experiment_name>"
    if not text.strip():  # which pathlib takes for the current folder
        return f"{key}={text}: names no folder; {fix}"
    folder = run_folder(config)
    left = [name for name in RUN_FILES if (folder / name).exists()]
    if left and not (folder / MANIFEST).exists():
        return f"{key}={text}: holds {left[0]}, which no run wrote and a run would move away; {fix}"
    return None


def _set_aside(run_dir: Path) -> None:
    """Move what an earlier run left to ``previous/<n>/``; a new start neither mixes with it nor
    deletes it."""
    left = [run_dir / name for name in RUN_FILES if (run_dir / name).exists()]
    if left:
        number = next(n for n in itertools.count(1) if not (run_dir / "previous" / str(n)).exists())
        (run_dir / "previous" / str(number)).mkdir(parents=True)
        for path in left:
            shutil.move(path, run_dir / "previous" / str(number) / path.name)


def _drop_after(run_dir: Path, step: int) -> None:
    """Remove what later steps wrote before the run went back to its checkpoint of ``step``, and
    damaged lines."""
    for path in (run_dir / METRICS, run_dir / SAMPLES):
        rows, damaged = intact_rows(path)
        if damaged:
            log.warning("%s: %d damaged lines are left out (%s)", path, len(damaged), damaged[0])
        if path.exists():
            write_atomic(path, "".join(json_line(row) for row in rows if row["step"] <= step))
    for path in [*(run_dir / "validation").glob("*.jsonl"), *(run_dir / "trace").glob("step_*")]:
        if step_of(path) > step or path.name.endswith(PARTIAL):  # or what a kill left half written
            path.unlink()


# --- rows: answers, JSON lines, and writes that may fail ---


def generation_rows(
    step: int, groups: Sequence[ScoredGroup], tokenizer: Any
) -> list[dict[str, Any]]:
    """Return one row a trajectory, under verl's names; ``output`` is the whole response, tool text
    included."""
    rows = []
    for group in groups:
        prompt = group.prompt
        # one placeholder a picture: a reader sees the picture, or none of its tokens
        ids = prompt.media.collapse(prompt.token_ids) if prompt.media else prompt.token_ids
        shared = {"uid": prompt.uid, "data_source": prompt.data_source, "ordinal": prompt.ordinal}
        shared |= {"input": tokenizer.decode(ids), "gts": prompt.ground_truth, "step": step}
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            output = "".join(segment.text for segment in trajectory.segments)
            own = {
                "pred": score.pred,
                "stop": trajectory.stop.value,
                "output": output,
                "score": score.value,
            }
            rows.append({**score.notes, **score.parts, **shared, **own})
    return rows


def spread_out(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` rows at even distances: the same questions at every validation."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def attempt(path: Path | str, write: Callable[[], Any]) -> bool:
    """Write a record and return whether it worked: one that cannot be written costs a warning,
    never the training."""
    try:
        write()
    except (OSError, WriteFailed) as error:
        reason = error if isinstance(error, WriteFailed) else write_failed(error, path, "a record")
        log.warning("%s. The run goes on without it", reason)
        return False
    return True


def step_of(path: Path) -> int:
    """Return the step of a record named ``step_N`` or ``N``, complete or not; -1 for another
    name."""
    number = path.name.split(".")[0].removeprefix("step_")
    return int(number) if number.isdecimal() else -1
