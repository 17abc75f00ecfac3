"""The run folder: everything a run leaves behind except its checkpoints.

``metrics.jsonl`` has a line a step under verl's names, which is on disk before the next step
begins; ``samples.jsonl`` has a few answers of every validation, ``validation/<step>.jsonl`` each
question's scores, and ``trace/`` the tokens of recorded steps. A run that resumes from step k keeps
what they hold up to k and drops the rest. In the end they are those of a run that was never
interrupted (``timing_s/`` and ``perf/`` excepted).
"""

import itertools
import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.config.convert import to_yaml
from core.config.paths import recipe_of, run_folder
from core.config.schema import Config
from core.errors import WriteFailed, write_failed, writing
from core.files import PARTIAL, is_url, upload, write_atomic
from core.tracking import run_manifest
from core.tracking.json_lines import append, intact_rows, json_line, read_jsonl
from core.tracking.loggers import Loggers, print_examples
from core.tracking.validation import ValRecord
from core.types import ScoredGroup, StepMetrics

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
MANIFEST = "manifest.json"
RUN_FILES = ("config.yaml", MANIFEST, METRICS, SAMPLES, "validation", "tensorboard", "trace")
KEPT_SAMPLES = 50  # answers of each data source in samples.jsonl, by a validation
KEPT_LAST = 5_000  # answers of each data source in samples.jsonl, by the last validation


class Tracker:
    """The owner of the run folder, until :meth:`close` records how the run ended.

    ``resume_step=None`` starts at the beginning (what an earlier run left in the folder moves to
    ``previous/<n>/``), ``resume_step=k`` resumes after step k. Where the checkpoint of that step is
    another run's (``continues`` is False), the records begin anew all the same. A record that
    cannot be written is dropped with a warning; a line of metrics waits for the next step. Raises
    WriteFailed if the folder cannot be written, and what :class:`Loggers` raises.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Config,
        resume_step: int | None = None,
        recipe: str | None = None,
        models: Mapping[str, Any] | None = None,
        changes: run_manifest.Changes | None = None,
        continues: bool = True,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.config = config
        self.resume_step = resume_step
        self._start_dir = Path.cwd()  # a scorer may change the current folder
        self._unwritten: list[Row] = []  # lines of metrics that the disk has not taken yet
        with writing(self.run_dir, "the run folder"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None or not continues:
                _set_aside(self.run_dir)
            else:
                _drop_after(self.run_dir, resume_step)
            steps = [row["step"] for row in read_jsonl(self.run_dir / METRICS)]
            self.last_step = max(steps, default=-1)
            self.manifest = run_manifest.begun(
                self.run_dir / MANIFEST,
                config,
                recipe or recipe_of(config, self.run_dir),
                resume_step,
                models or {},
                changes or {},
            )
            self._write_manifest()
            write_atomic(self.run_dir / "config.yaml", to_yaml(config))
            # The file is also there if the run ends before its first step
            (self.run_dir / METRICS).touch()
        try:
            self._loggers = Loggers(self)
        except BaseException:
            self._end("failed")
            raise

    def _write_manifest(self) -> None:
        write_atomic(self.run_dir / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")

    def set_total(self, total: int) -> None:
        """Record how many steps the run has, for the console and for a report of a short run."""
        self.manifest["total_steps"] = total
        attempt(self.run_dir / MANIFEST, self._write_manifest)

    def log(self, metrics: StepMetrics) -> None:
        """Append a step to metrics.jsonl and send it to the loggers.

        Raises ValueError if the step is not above the last one.
        """
        if metrics.step <= self.last_step:
            raise ValueError(
                f"step {metrics.step} logged after {self.last_step}: each step is logged once, "
                "in order"
            )
        self.last_step = metrics.step
        self._unwritten.append({"step": metrics.step, **metrics.values})
        if attempt(self.run_dir / METRICS, lambda: append(self.run_dir / METRICS, self._unwritten)):
            self._unwritten.clear()
        self._loggers.call("log", metrics.step, metrics.values)

    def amend(self, metrics: StepMetrics) -> None:
        """Add numbers to the last line of metrics.jsonl, that of their step, and to the loggers."""
        rows, _ = intact_rows(self.run_dir / METRICS)
        rows[-1] |= metrics.values
        text = "".join(map(json_line, rows))
        attempt(self.run_dir / METRICS, lambda: write_atomic(self.run_dir / METRICS, text))
        self._loggers.call("log", metrics.step, metrics.values)

    def has_validation(self, step: int) -> bool:
        """Return whether the scores of a validation after this step are kept."""
        return (self.run_dir / "validation" / f"{step}.jsonl").exists()

    def log_validation(self, step: int, records: Iterable[ValRecord]) -> None:
        """Keep each question's scores, for intervals and paired comparisons.

        A repeated step is replaced.
        """
        self.dump(self.run_dir / "validation", step, [record.to_json() for record in records])

    def dump(self, folder: str | Path, step: int, rows: Sequence[Row], key: str = "folder") -> None:
        """Write ``<folder>/<step>.jsonl``, as verl does.

        ``key`` is the configuration's key of a folder that may be a URL.
        """
        name = f"{step}.jsonl"
        text = "".join(map(json_line, rows))

        def write() -> None:
            if is_url(folder):
                upload(str(folder), key, name, text.encode())
                return
            directory = self._start_dir / os.path.expanduser(folder)
            directory.mkdir(parents=True, exist_ok=True)
            write_atomic(directory / name, text)

        attempt(f"{folder}/{name}", write)

    def show(self, step: int, rows: Sequence[Row], printed: int, key: str) -> None:
        """Print ``printed`` rows of each data source; write all to the folder ``trainer.<key>``."""
        print_examples(rows, printed)
        if folder := getattr(self.config.trainer, key):
            self.dump(folder, step, rows, f"trainer.{key}")

    def log_samples(self, step: int, rows: Sequence[Row], last: bool = False) -> None:
        """Keep some :func:`generation_rows` of each data source, always the same questions."""
        by_source = defaultdict(list)
        for row in rows:
            by_source[row.get("data_source")].append({**row, "step": step})
        most = KEPT_LAST if last else KEPT_SAMPLES
        kept = [row for of_source in by_source.values() for row in spread_out(of_source, most)]
        attempt(self.run_dir / SAMPLES, lambda: append(self.run_dir / SAMPLES, kept))

    def close(self, status: str) -> None:
        """End the run: ``finished``, ``stopped`` (by the user) or ``failed``.

        A second call changes nothing.
        """
        if self.manifest["status"] == "running":
            self._end(status)
            self._loggers.call("close", status == "failed")

    def _end(self, status: str) -> None:
        self.manifest["status"] = status
        self.manifest["sessions"][-1]["ended"] = run_manifest.now()
        attempt(self.run_dir / MANIFEST, self._write_manifest)


def folder_problem(config: Config) -> str | None:
    """Return what is wrong with a run folder that is not there yet, or that no run wrote."""
    text = config.trainer.default_local_dir
    key = f"trainer.default_local_dir={text}"
    fix = "name a folder of the run's own, or leave it out for outputs/<recipe>/<experiment_name>"
    if not text.strip():  # pathlib takes it for the current folder
        return f"{key}: names no folder; {fix}"
    folder = run_folder(config)
    present = [name for name in RUN_FILES if (folder / name).exists()]
    if present and not (folder / MANIFEST).exists():
        return f"{key}: holds {present[0]}, which no run wrote and a run would move away; {fix}"
    return None


def _set_aside(run_dir: Path) -> None:
    """Move the files of an earlier run to ``previous/<n>/``: a new start keeps them apart."""
    present = [run_dir / name for name in RUN_FILES if (run_dir / name).exists()]
    if present:
        numbered = (run_dir / "previous" / str(number) for number in itertools.count(1))
        target = next(folder for folder in numbered if not folder.exists())
        target.mkdir(parents=True)
        for path in present:
            shutil.move(path, target / path.name)


def _drop_after(run_dir: Path, step: int) -> None:
    """Remove what steps after the checkpoint of ``step`` wrote, and damaged lines."""
    for path in (run_dir / METRICS, run_dir / SAMPLES):
        rows, damaged = intact_rows(path)
        if damaged:
            log.warning("%s: %d damaged lines are left out (%s)", path, len(damaged), damaged[0])
        if path.exists():
            write_atomic(path, "".join(json_line(row) for row in rows if row["step"] <= step))
    for path in [*(run_dir / "validation").glob("*.jsonl"), *(run_dir / "trace").glob("step_*")]:
        left_by_kill = path.name.endswith(PARTIAL)
        if step_of(path) > step or left_by_kill:
            path.unlink()


# -- records: answers, and writes that may fail ----------------------------------------------------


def generation_rows(
    step: int, groups: Sequence[ScoredGroup], tokenizer: Any
) -> list[dict[str, Any]]:
    """Return one row a trajectory, under verl's names.

    ``output`` is the whole response, tool text included.
    """
    rows = []
    for group in groups:
        prompt = group.prompt
        ids = prompt.token_ids
        if prompt.media:  # a picture is one placeholder in the text, however many tokens it has
            ids = prompt.media.collapse(ids)
        prompt_text = tokenizer.decode(ids)
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            row = {
                **score.notes,
                **score.parts,
                "uid": prompt.uid,
                "data_source": prompt.data_source,
                "ordinal": prompt.ordinal,
                "input": prompt_text,
                "gts": prompt.ground_truth,
                "step": step,
                "pred": score.pred,
                "stop": trajectory.stop.value,
                "output": "".join(segment.text for segment in trajectory.segments),
                "score": score.value,
            }
            rows.append(row)
    return rows


def spread_out(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` rows at even distances: the same questions at every validation."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def attempt(path: Path | str, write: Callable[[], Any]) -> bool:
    """Write a record and return whether it worked.

    A record that cannot be written costs a warning, never the training.
    """
    try:
        write()
    except (OSError, WriteFailed) as error:
        reason = error if isinstance(error, WriteFailed) else write_failed(error, path, "a record")
        log.warning("%s. The run goes on without it", reason)
        return False
    return True


def step_of(path: Path) -> int:
    """Return the step of a record named ``step_N`` or ``N``; -1 for another name.

    The record may be incomplete.
    """
    number = path.name.split(".")[0].removeprefix("step_")
    return int(number) if number.isdecimal() else -1
