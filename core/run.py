"""What surrounds the loop: the run's folder, checkpoints, record, health and signals.

A :class:`Run` starts, resumes, records, saves and stops. The trainer holds one. It knows no phase
of a step: what it needs of the loop arrives as arguments, and it never calls back.
``core/command_line.py`` starts the trainer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from core.algorithm.kl import KLController
from core.checkpoint import run_state
from core.checkpoint.provenance import MODELS, Change, Provenance, bases, check_resume
from core.checkpoint.store import Checkpoint, CheckpointStore, RemoteCopy, resolve_resume
from core.config import convert
from core.config.paths import recipe_of, run_folder
from core.errors import (
    InputError,
    UnhealthyRun,
    WorkersLost,
    WriteFailed,
    memory_phase,
    message_of,
    printable,
)
from core.files import check_writable, is_url
from core.graceful_stop import GracefulStop
from core.rollout.collect import CollectState, StopRequested
from core.tracking import run_manifest
from core.tracking.health import NONFINITE, Health
from core.tracking.loggers import check_loggers
from core.tracking.metrics import REST, time_parts
from core.tracking.tracker import Tracker
from core.types import StepMetrics

if TYPE_CHECKING:
    from core.cluster.workers import Workers
    from core.config.schema import Config
    from core.data.prompts import PromptStream

log = logging.getLogger(__name__)
# Keys that decide which weights a checkpoint holds: resume_with_changes cannot change them
ADAPTERS = ("lora_rank", "target_modules", "exclude_modules")
ADAPTED = ("actor_rollout_ref.model", "critic.model")
TRAINED_KEYS = {f"{model}.{name}" for model in ADAPTED for name in ADAPTERS}
TRAINED_KEYS |= {"actor_rollout_ref.actor.freeze_vision_tower"}


@dataclass(frozen=True)
class LoopState:
    """What the loop carries to the next step beside the weights: a part of every checkpoint."""

    kl_controller: KLController
    collect_state: CollectState


class Run:
    """The surroundings of one run.

    The order of calls: :meth:`fetch`, :meth:`count_steps` and :meth:`open` before a model loads,
    :meth:`attach` to resume, :meth:`running` around the loop, :meth:`complete` after each step.
    """

    def __init__(self, config: Config, state: LoopState):
        self.config = config
        self.trainer = config.trainer
        self.state = state
        self.run_dir = run_folder(config).absolute()  # a scorer may change the current folder
        self.store = CheckpointStore(self.run_dir, keep=config.trainer.max_actor_ckpt_to_keep)
        url = config.trainer.default_local_dir
        self.remote = RemoteCopy(url, self.store) if is_url(url) else None
        self.stop = GracefulStop()
        self.health = Health()
        # Bounds that the last step crossed: they were warned of
        self.crossed_bounds: set[str] = set()
        self.step = 0  # complete steps
        self.total_steps = 0
        # Number of prompts in total_epochs; infinite if total_training_steps is set
        self.ordinal_limit: float = math.inf
        # True from the first update of a step until its end: weights may be those of no step
        self.updating = False
        self.saved_step: int | None = None  # of the newest checkpoint
        # Whether the run folder has a checkpoint of this run: resume_mode=auto then continues it
        self.has_own_checkpoint = False
        self.saving_s = 0.0  # seconds of checkpoints since the last line of metrics
        self.line_ended = time.perf_counter()
        # Set by open, attach and running:
        self.stream: PromptStream | None = None
        self.contents: Mapping[str, list[str]] = {}
        self.changes: Sequence[Change] = ()  # since the checkpoint that the run resumes from
        self.workers: Workers | None = None
        self.tracker: Tracker | None = None

    # -- starting --------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Check loggers and URLs to write to; fetch what is newer at the run folder's URL.

        Called before anything opens a file of the run folder. Raises InputError.
        """
        check_loggers(self.trainer.logger)
        for name in ("rollout_data_dir", "validation_data_dir"):
            check_writable(getattr(self.trainer, name) or "", f"trainer.{name}")
        if self.remote is not None:
            if not self.trainer.val_only:
                self.store.claim()
            self.remote.open(writes=not self.trainer.val_only)

    def recorded_date(self) -> str | None:
        """Return the date that the chat template wrote at the first start, if it is recorded."""
        trainer = self.trainer
        folder = self.run_dir
        if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
            folder = Path(trainer.resume_from_path).expanduser().parent
        file = folder / "config.yaml"
        if trainer.resume_mode == "disable" or not file.is_file():
            return None
        recorded = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        date = (recorded.get("data") or {}).get("chat_template_date")
        return date and str(date)

    def count_steps(self, stream: PromptStream) -> None:
        """Count the steps of the run. Raises InputError if an epoch has no whole batch."""
        trainer = self.trainer
        batch_size = self.config.data.train_batch_size
        prompts = len(stream)
        if trainer.total_training_steps is not None:
            self.total_steps = trainer.total_training_steps
            return
        self.total_steps = stream.steps(trainer.total_epochs, batch_size)
        self.ordinal_limit = trainer.total_epochs * prompts
        if self.total_steps == 0:
            raise InputError(
                f"data.train_batch_size={batch_size}: an epoch has only {prompts} prompts; "
                "lower it, or set trainer.total_training_steps"
            )

    def open(self, stream: PromptStream, *, critic: bool) -> Checkpoint | None:
        """Return the checkpoint to resume from, if any. No model is loaded yet.

        Raises InputError if the checkpoint is damaged, or belongs to a run with another base, other
        data or another objective.
        """
        trainer = self.trainer
        batch_size = self.config.data.train_batch_size
        prompts = len(stream)
        self.stream = stream
        self.contents = {**run_manifest.contents(self.config), **bases(self.config)}
        checkpoint = resolve_resume(trainer, self.store)
        if checkpoint is not None:
            self._check_checkpoint(checkpoint, critic=critic)
        if min(batch_size, self.ordinal_limit) > prompts:
            text = "data.train_batch_size=%d: a step repeats some of the %d prompts"
            log.warning(text, batch_size, prompts)
        if trainer.save_freq == 0 and not trainer.val_only:
            text = "no checkpoint is written, and no weights are kept (-1 keeps the last)"
            log.warning("trainer.save_freq=0: %s", text)
        print(f"writes to {self.run_dir}", flush=True)
        return checkpoint

    def _check_checkpoint(self, checkpoint: Checkpoint, *, critic: bool) -> None:
        """Compare the run with its checkpoint, and send the checkpoint on if that was cut short."""
        folder = checkpoint.folder
        if critic and not (folder / "critic").is_dir():
            raise InputError(
                f"{folder} holds none: this run trains a critic, which algorithm.adv_estimator "
                "decides; set it to that of the run that wrote it"
            )
        self._compare(checkpoint)
        if self.remote is None or self.trainer.val_only or folder.parent != self.store.root:
            return
        if self.remote.newest < checkpoint.step:
            self.remote.send(checkpoint.step)

    def _compare(self, checkpoint: Checkpoint) -> None:
        """Compare the run, as far as it is known, with the checkpoint. Raises InputError."""
        saved = checkpoint.provenance
        # A run that only validates trains nothing: it may differ in any key
        allow = self.trainer.resume_with_changes or self.trainer.val_only
        self.changes = check_resume(checkpoint.folder, saved, self.provenance(saved), allow=allow)
        for change in self.changes:
            section, _, name = change.key.rpartition(".")
            if change.key not in TRAINED_KEYS:
                continue
            always = name in ("lora_rank", "freeze_vision_tower")
            if always or convert.get(self.config, f"{section}.lora_rank") > 0:
                raise InputError(
                    f"{change}: {checkpoint.folder} has other trained weights, and an optimizer of "
                    "those; take the change back, or export it (python -m core.export) and start a "
                    "new run from the export"
                )

    def attach(self, workers: Workers, checkpoint: Checkpoint | None) -> LoopState:
        """Take in the loaded models, resume from the checkpoint, and return the loop's state."""
        self.workers = workers
        self.contents |= bases(self.config)  # models of hub ids are on this machine only now
        if checkpoint is None:
            return self.state
        self._compare(checkpoint)
        if self.changes:
            changes = "; ".join(map(str, self.changes))
            log.warning(
                "resuming %s with changes, so not to the bit: %s", checkpoint.folder, changes
            )
        workers.load(checkpoint.folder)
        saved = run_state.DriverState.load(checkpoint.folder, self.stream.prompt)
        self.step = saved.step
        self.saved_step = saved.step
        self.has_own_checkpoint = checkpoint.folder.parent == self.store.root
        self.health = Health(**saved.values["health"])
        # The run may now allow less staleness than the one that wrote the checkpoint
        oldest_version = self.step - self.trainer.max_staleness
        carried = {n: g for n, g in saved.carried.items() if g.version >= oldest_version}
        if self.stream.keeps_tail and self.trainer.total_training_steps is None:
            # The run may have ended with a short batch, and now has more epochs
            batch_size = self.config.data.train_batch_size
            epochs = self.trainer.total_epochs
            steps_left = self.stream.steps(epochs, batch_size, saved.next_ordinal)
            self.total_steps = self.step + steps_left
        kl_controller = self.state.kl_controller.with_state(saved.values["kl_controller"])
        collect_state = CollectState(saved.next_ordinal, saved.values["keep_rate"], carried)
        self.state = LoopState(kl_controller, collect_state)
        run_state.set_rng_state(run_state.load_tensors(checkpoint.folder / "rng.pt"))
        checkpoint.release()
        log.info("resumed after step %d from %s", self.step, checkpoint.folder)
        return self.state

    def provenance(self, saved: Provenance | None = None) -> Provenance:
        """Return which run this is. Without workers it takes ranks and threads of ``saved``."""
        processes = self.workers or saved
        return Provenance(
            ranks=processes.ranks if processes else 0,
            threads=processes.threads if processes else 0,
            seed=self.trainer.seed,
            config=convert.as_json(self.config),
            contents=self.contents,
        )

    # -- around the loop -------------------------------------------------------------------------

    @contextmanager
    def around_loop(self, *parts: Any) -> Iterator[asyncio.Runner]:
        """Hold signals, event loop and tracker while the loop runs; then close them and ``parts``.

        A requested stop saves and does not raise. An error while a step collects saves the complete
        steps, and is raised again. The run's manifest records as its status how the block ended.
        """
        self.tracker = self._open_tracker()
        status = "failed"
        try:
            with memory_phase("update_weights"), self.stop, asyncio.Runner() as runner:
                try:
                    yield runner
                    status = "finished"
                except StopRequested:
                    self.save()
                    status = "stopped"
                    self._report_stop()
                except UnhealthyRun as error:
                    if not self.updating:
                        raise
                    reason = f"stopped in step {self.step + 1}: {error}; {self._newest()}"
                    raise UnhealthyRun(reason) from error
                except Exception as error:
                    self._save_complete_steps(error)
                    raise
        except Exception as error:
            cause = message_of(error)
            if isinstance(error, UnhealthyRun):
                status = "stopped"
            else:
                cause = f"{type(error).__name__}: {cause}"
            self.tracker.manifest["stopped_because"] = printable(cause)
            raise
        finally:
            self._close(status, parts)

    def _close(self, status: str, parts: Sequence[Any]) -> None:
        """Close the tracker and the parts, and send the last files to the run folder's URL."""
        self.tracker.close(status)
        if self.remote is not None and not self.trainer.val_only:
            try:
                self.remote.send_files()
            except InputError as error:  # it must not hide how the run ended
                log.warning("%s", error)
        for part in parts:
            if part is not None:
                part.close()

    def _report_stop(self) -> None:
        same_command = self.trainer.resume_mode == "auto" or not self.has_own_checkpoint
        resume = "" if same_command else " with trainer.resume_mode=auto"
        text = "stopped after step %d of %d (%s); the same command continues%s"
        log.warning(text, self.step, self.total_steps, self.stop.cause, resume)

    def _newest(self) -> str:
        """Return a sentence about the checkpoint that the run can go on from."""
        if self.saved_step is None:
            return "no checkpoint was written: begin again"
        return (
            f"the newest checkpoint is that of step {self.saved_step}: the run goes on from it "
            "with other settings by trainer.resume_with_changes=True"
        )

    def _save_complete_steps(self, error: Exception) -> None:
        """Save before an error ends the run, if the weights are those of a complete step."""
        if self.updating or isinstance(error, WorkersLost | WriteFailed):
            return
        try:
            self.save()
        except Exception as failure:  # it must not hide why the run ends
            log.warning("step %d is not saved (%s: %s)", self.step, type(failure).__name__, failure)

    def _open_tracker(self) -> Tracker:
        """Return the tracker of this session, which records the models and what changed."""
        only_validates = self.trainer.val_only
        if self.finished() and not only_validates:
            text = (
                "the run is finished: step %d of %d is done; "
                "raise trainer.total_training_steps or total_epochs"
            )
            log.warning(text, self.step, self.total_steps)
        folder = self.run_dir
        resume_step = self.saved_step
        if only_validates:
            folder = self.run_dir / f"val_only_step_{self.step}"
            resume_step = None
        models = {
            name: {"path": convert.get(self.config, key), "sha256": self.contents[key][0]}
            for name, key in MODELS.items()
            if key in self.contents
        }
        changes = {change.key: [change.there, change.here] for change in self.changes}
        recipe = recipe_of(self.config, self.run_dir)  # not of the folder in it that validates
        own = self.has_own_checkpoint
        tracker = Tracker(folder, self.config, resume_step, recipe, models, changes, own)
        if nodes := getattr(self.workers, "nodes", ()):  # only a cluster's workers have nodes
            tracker.manifest["sessions"][-1]["nodes"] = nodes
        if not only_validates:
            tracker.set_total(self.total_steps)
        return tracker

    # -- steps -----------------------------------------------------------------------------------

    def metrics_of_steps(self) -> Iterator[StepMetrics]:
        """Yield the metrics of each step to come, empty, until the run is finished."""
        self.line_ended = time.perf_counter()
        while not self.finished():
            yield StepMetrics(self.step + 1)

    def finished(self) -> bool:
        """Return whether no step is left."""
        return self.trainer.val_only or self.is_last(self.step, self.state)

    def is_last(self, step: int, state: LoopState) -> bool:
        """Return whether no step follows: all are done, or the epochs have no prompt left."""
        has_prompts = state.collect_state.next_ordinal < self.ordinal_limit
        return step >= self.total_steps or not has_prompts

    def is_due(self, frequency: int, step: int, state: LoopState) -> bool:
        """Return whether something is due that happens every ``frequency`` steps and at the end."""
        return frequency > 0 and (step % frequency == 0 or self.is_last(step, state))

    def lacks_validation(self) -> bool:
        """Return whether a stop cut short the validation that was due after the last step."""
        if not self.config.data.val_files or not 0 < self.step == self.tracker.last_step:
            return False
        was_due = self.is_due(self.trainer.test_freq, self.step, self.state)
        return was_due and not self.tracker.has_validation(self.step)

    def complete(self, metrics: StepMetrics, state: LoopState) -> None:
        """Record the step, save it if due, and stop an unhealthy run.

        The line is on disk before the checkpoint that it belongs to. Raises UnhealthyRun.
        """
        save_is_due = self._save_is_due(metrics.step, state)
        self.step = metrics.step
        self.state = state
        self.updating = False
        crossed = self._check_health(metrics)
        self._log_line(metrics)
        if save_is_due:
            try:
                self.save()
            except WriteFailed as error:
                if self.finished():
                    raise
                # A run of days may find room before its next save
                log.warning("%s. Training goes on, and the next checkpoint is another try", error)
        if NONFINITE in crossed:
            self._stop_unhealthy(crossed[NONFINITE])

    def _log_line(self, metrics: StepMetrics) -> None:
        """Write the step's line of metrics. A checkpoint's seconds are on the line after it."""
        if self.saving_s:
            metrics.add({"timing_s/save_checkpoint": self.saving_s})
        now = time.perf_counter()
        metrics.add({"timing_s/whole": now - self.line_ended})
        metrics.add({"timing_s/other": time_parts(metrics.values)[REST]})
        self.line_ended = now
        self.saving_s = 0.0
        self.tracker.log(metrics)

    def _save_is_due(self, step: int, state: LoopState) -> bool:
        """Return whether a checkpoint follows the step that led from the run's state to this."""
        frequency = self.trainer.save_freq
        if frequency == "after_each_epoch":
            prompts = len(self.stream)
            epoch_before = self.state.collect_state.next_ordinal // prompts
            epoch_after = state.collect_state.next_ordinal // prompts
            return epoch_after > epoch_before or self.is_last(step, state)
        if frequency < 0:
            return self.is_last(step, state)
        return self.is_due(frequency, step, state)

    def outcome(self) -> str:
        """Return how the run ended, in a few words."""
        if self.trainer.val_only:
            return f"validated after step {self.step}"
        end = "finished" if self.finished() else "stopped"
        return f"{end} after step {self.step} of {self.total_steps}"

    def save(self) -> None:
        """Write a checkpoint of the last complete step, if there is none; send it to the URL.

        A run that is killed before it is complete resumes from the one before. Raises WriteFailed.
        """
        if self.step in (0, self.saved_step):
            return
        start = time.perf_counter()
        collect_state = self.state.collect_state
        state = run_state.DriverState(
            step=self.step,
            next_ordinal=collect_state.next_ordinal,
            carried=collect_state.carried,
            values={
                "keep_rate": collect_state.keep_rate,
                "health": dataclasses.asdict(self.health),
                "kl_controller": self.state.kl_controller.state_dict(),
            },
        )
        hashes: dict[str, str] = {}
        writing = self.store.writing(self.step, self.provenance(), hashes)
        with memory_phase("save_checkpoint"), writing as folder:
            hashes.update(self.workers.save(folder))
            state.save(folder)
            run_state.save_tensors(folder / "rng.pt", run_state.rng_state())
        self.saved_step = self.step
        self.has_own_checkpoint = True
        if self.remote is not None:
            self.remote.send(self.step)
        self.saving_s += time.perf_counter() - start

    # -- health ----------------------------------------------------------------------------------

    def _check_health(self, metrics: StepMetrics) -> Mapping[str, str]:
        """Compare the step with ``trainer.health`` and return the bounds that it crossed.

        Warn of those that the step before did not cross.
        """
        crossed = self.health.check(self.step, metrics.values, self.trainer.health)
        last_healthy = self.health.last_healthy_step
        metrics.add(
            {"health/crossed_bounds": len(crossed), "health/last_healthy_step": last_healthy}
        )
        self.tracker.manifest["last_healthy_step"] = last_healthy
        for bound, text in crossed.items():
            if bound not in self.crossed_bounds:
                log.warning("step %d: %s (last healthy step %d)", self.step, text, last_healthy)
        self.crossed_bounds = set(crossed)
        advice = self.health.flat_advice(self.total_steps, metrics.values)
        for reason in filter(None, (self.health.stuck(), advice)):
            log.warning("step %d: %s", self.step, reason)
        return crossed

    def _stop_unhealthy(self, text: str) -> NoReturn:
        """Save and raise UnhealthyRun."""
        saved = f"saved in {self.store.folder(self.step)}"
        try:
            self.save()
        except WriteFailed as error:  # it must not hide why the run stops
            saved = f"not saved ({error})"
        raise UnhealthyRun(
            f"stopped after step {self.step}, {saved}: {text}; the last healthy step is "
            f"{self.health.last_healthy_step}, trainer.resume_from_path goes back to one"
        )
