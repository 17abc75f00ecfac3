"""The run folder: everything a run leaves behind except its checkpoints.

``<run_dir>/config.yaml`` resolved configuration · ``manifest.json`` the run manifest: provenance and status ·
``metrics.jsonl`` one line a step, on disk before the next step begins · ``samples.jsonl`` a few generations of every
validation · ``validation/<step>.jsonl`` each question's scores · ``trace/`` the tokens of recorded steps.

**Resume.** A run that goes on from the checkpoint of step k keeps the lines up to k and drops the rest, so that its
files end up as those of a run that was never interrupted (``timing_s/`` and ``perf/`` excepted). For that a step is
logged before its checkpoint is complete. TensorBoard purges what follows k as well; wandb cannot take steps back and
keeps the first values it was sent, MLflow keeps both.

**Metric names** are verl's: ``critic/{score,rewards,advantages,returns,values}/{mean,max,min}``, ``critic/vf_*``,
``actor/{entropy,pg_loss,kl_loss,ppo_kl,pg_clipfrac,pg_clipfrac_lower,grad_norm,lr}``,
``{response,prompt}_length/{mean,max,min,clip_ratio}``, ``rollout_corr/*``, ``timing_s/{gen,reward,old_log_prob,ref,
values,adv,update_critic,update_actor,save_checkpoint,testing,step}``, ``perf/*``, ``training/{global_step,epoch}``, and
the validation names of :mod:`core.tracking.validation`. Not verl's: ``reward/<part>/mean`` and ``collect/*``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from core.config import Config, to_yaml
from core.errors import writing
from core.files import PARTIAL, is_url, upload, write_atomic
from core.tracking import records, run_manifest
from core.tracking.loggers import LoggedRun, Loggers, headline
from core.tracking.records import Records, Row, intact_rows, json_line, read_jsonl, step_of
from core.tracking.run_manifest import RunFacts
from core.tracking.samples import of_each_source, spread_out
from core.tracking.validation import ValRecord
from core.types import Prompt, StepMetrics

ENDINGS = ("finished", "stopped", "failed")
METRICS, SAMPLES, MANIFEST = "metrics.jsonl", "samples.jsonl", "manifest.json"
PICTURES = "pictures.json"  # data_source -> uid -> thumbnails of the questions in samples.jsonl
RUN_FILES = ("config.yaml", MANIFEST, METRICS, SAMPLES, PICTURES, "validation", "tensorboard", "trace")
KEPT_SAMPLES = 50  # generations of each data source that samples.jsonl keeps of a validation, at the least


class Tracker:
    """The owner of the run folder, until :meth:`close` records how the run ended.

    ``resume_step=None`` starts at the beginning (what an earlier run left in the folder moves to ``previous/<n>/``),
    ``resume_step=k`` goes on after step k. Create it once threads are set and data files are known: both are recorded.
    ``recipe`` is by default the name of the folder that holds the run's.

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
        self.records = Records()
        self._unwritten: list[Row] = []  # lines of metrics that the disk has not taken yet
        with writing(self.run_dir, "the run folder"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _set_aside(self.run_dir)
            else:
                mend_run_folder(self.run_dir)
                _drop_after(self.run_dir, resume_step)
            self._last_step = max((row["step"] for row in read_jsonl(self.run_dir / METRICS)), default=-1)
            recipe = recipe or self.run_dir.resolve().parent.name
            path = self.run_dir / MANIFEST
            self.manifest = run_manifest.begun(path, config, recipe, resume_step, self._last_step, facts)
            self._write_manifest()
            write_atomic(self.run_dir / "config.yaml", to_yaml(config))
            (self.run_dir / METRICS).touch()  # a run that ends before its first step has one too
        self._bar: Any = None
        run_id, sessions = self.manifest["run_id"], self.manifest["sessions"]
        self._run = LoggedRun(config, self.run_dir, run_id, resume_step, self.manifest["recipe"], sessions)
        try:
            self._loggers = Loggers(self._run, self._note_logger)
        except BaseException:
            self._end("failed")
            raise

    def _note_logger(self, name: str, reason: str) -> None:
        self.manifest["sessions"][-1].setdefault("logger_failures", {})[name] = reason
        self._keep_manifest()

    def _write_manifest(self) -> None:
        write_atomic(self.run_dir / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")

    def _keep_manifest(self) -> bool:
        return self.records.attempt(MANIFEST, self.run_dir / MANIFEST, self._write_manifest, "stays as it is")

    def note(self, name: str, value: Any) -> None:
        """Add a fact about the run to its manifest, which is written when the run ends."""
        self.manifest[name] = value

    def progress(self, total: int) -> None:
        """Show a bar on a terminal (step, reward, length, time left) and ``step/total`` on the console.

        ``total`` also goes into the manifest, from which a report knows that a run ended early.
        """
        self.manifest["total_steps"] = total
        self._keep_manifest()
        self._run.total = total
        if sys.stderr.isatty():  # a log has the console's line for each step
            self._bar = tqdm(total=total, initial=max(0, self._last_step), unit="step", dynamic_ncols=True)

    def log(self, metrics: StepMetrics) -> None:
        """Append a step to metrics.jsonl and send it to the loggers. Raises ValueError where steps do not rise.

        A line that a full disk does not take waits for the next step.
        """
        if metrics.step <= self._last_step:
            raise ValueError(f"step {metrics.step} logged after {self._last_step}: each step is logged once, in order")
        self._last_step = metrics.step
        self._unwritten.append({"step": metrics.step, **metrics.values})
        self._append_metrics("waits for the next step")
        self._loggers.log(metrics.step, metrics.values)
        if self._bar is not None:
            shown = {label: f"{value:{form}}" for label, value, form in headline(metrics.values)}
            self._bar.set_postfix({k: v for k, v in shown.items() if k in ("reward", "length")}, refresh=False)
            self._bar.update(metrics.step - self._bar.n)

    def _append_metrics(self, lost: str) -> None:
        path = self.run_dir / METRICS
        if self.records.attempt(METRICS, path, lambda: records.append(path, self._unwritten), lost):
            self._unwritten.clear()

    def log_validation(self, step: int, rows: Iterable[ValRecord]) -> None:
        """Keep each question's scores, for intervals and paired comparisons. A repeated step is replaced."""
        self.dump(self.run_dir / "validation", step, [row.to_json() for row in rows])

    def dump(self, folder: str | Path, step: int, rows: Sequence[Row], key: str = "folder") -> None:
        """Write the rows with :func:`dump_jsonl`, where that is possible."""
        path = f"{folder}/{step}.jsonl"
        self.records.attempt(Path(folder).name, path, lambda: dump_jsonl(folder, step, rows, key))

    def log_samples(self, step: int, rows: Sequence[Row], prompts: Iterable[Prompt] = ()) -> None:
        """Keep a few of these generations for the report; trainer.log_val_generations of them go to the loggers.

        ``rows`` are those of :func:`core.tracking.samples.generation_rows`, ``prompts`` the questions, of whose media
        the report shows thumbnails.
        """
        count = self.config.trainer.log_val_generations
        kept = [{**row, "step": step} for row in of_each_source(rows, max(count, KEPT_SAMPLES))]
        path = self.run_dir / SAMPLES
        self.records.attempt(SAMPLES, path, lambda: records.append(path, kept))
        media = {(prompt.data_source, prompt.uid): prompt.media for prompt in prompts if prompt.media}
        of_kept = ((row.get("data_source"), row.get("uid")) for row in kept)
        if shown := {question: media[question] for question in of_kept if question in media}:
            from core.vision.pictures import keep_thumbnails

            file = self.run_dir / PICTURES
            self.records.attempt(PICTURES, file, lambda: keep_thumbnails(file, shown))
        if count:
            self._loggers.samples(step, spread_out(rows, count))

    def close(self, status: str) -> None:
        """End the run: ``finished``, ``stopped`` (by the user) or ``failed``. A second call changes nothing."""
        if status not in ENDINGS:
            raise ValueError(f"status {status!r}: must be one of {', '.join(ENDINGS)}")
        if self.manifest["status"] == "running":
            self._end(status)
            if self._bar is not None:
                self._bar.close()
            self._loggers.close(status == "failed")

    def _end(self, status: str) -> None:
        """Write what is left, and the status, which needs no room on a full disk."""
        self.manifest["status"] = status
        self.manifest["sessions"][-1]["ended"] = run_manifest.now()
        if self._unwritten:  # a last try
            self._append_metrics("is lost")
        if self.records.dropped:
            self.manifest["sessions"][-1]["records_dropped"] = dict(self.records.dropped)
        if not self._keep_manifest():
            run_manifest.put_status(self.run_dir / MANIFEST, status)


def dump_jsonl(folder: str | Path, step: int, rows: Iterable[Row], key: str = "folder") -> None:
    """Write ``<folder>/<step>.jsonl``, as verl does for rollout_data_dir and validation_data_dir.

    Raises InputError, which names ``key``, where the folder is a URL that cannot be written.
    """
    name, text = f"{step}.jsonl", "".join(map(json_line, rows))
    if is_url(folder):
        return upload(str(folder), key, name, text.encode())
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


# --- resuming ---


def mend_run_folder(run_dir: Path) -> None:
    """Set what is damaged of the run's records aside, with a warning: a run resumes from its checkpoint, not from them.

    Call it before models load. Raises OSError.
    """
    records.mend(run_dir / METRICS)
    records.mend(run_dir / SAMPLES)
    run_manifest.mend(run_dir / MANIFEST)


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
    for path in (run_dir / METRICS, run_dir / SAMPLES):
        if path.exists():
            rows, _ = intact_rows(path, of_steps=True)
            write_atomic(path, "".join(json_line(row) for row in rows if row["step"] <= step))
    for path in (run_dir / "validation").glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) > step:
            path.unlink()
    for path in (run_dir / "trace").glob("step_*"):
        if step_of(path) > step or path.name.endswith(PARTIAL):  # or what a kill left half written
            path.unlink()
