"""What surrounds the loop: the run's folder, its checkpoints, its record, its health and its
signals.

A :class:`Run` starts, resumes, records, saves and stops; the trainer holds one. It knows no phase
of a step: what it needs of the loop arrives as arguments, and it never calls back. Who starts a
trainer is ``core/command_line.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
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
from core.rollout.collect import CollectState, StopRequested
from core.tracking import run_manifest
from core.tracking.health import NONFINITE, Health
from core.tracking.loggers import check_loggers
from core.tracking.metrics import REST, time_parts
from core.tracking.tracker import Tracker
from core.types import StepMetrics

if TYPE_CHECKING:
    from core.cluster.workers import Workers
    from core.config.schema import Config, TrainerConfig
    from core.data.prompts import PromptStream

log = logging.getLogger(__name__)
# Keys of what a checkpoint holds: resume_with_changes cannot change them
ADAPTER_KEYS = {
    f"{model}.{name}"
    for model in ("actor_rollout_ref.model", "critic.model")
    for name in ("lora_rank", "target_modules", "exclude_modules")
}


@dataclass(frozen=True)
class LoopState:
    """What the loop carries from one step to the next beside the weights: a part of every
    checkpoint."""

    kl_controller: KLController
    collect: CollectState


class Run:
    """The surroundings of one run. ``step`` counts complete steps; ``saved_step`` is that of the
    newest checkpoint.

    :meth:`fetch` comes first, :meth:`open` finds the checkpoint before a model loads,
    :meth:`attach` resumes from it, :meth:`running` lasts as long as the loop, and :meth:`complete`
    ends each step.
    """

    def __init__(self, config: Config, state: LoopState):
        self.config, self.trainer, self.state = config, config.trainer, state
        self.run_dir = run_folder(config).absolute()  # a scorer may change the current folder
        self.store = CheckpointStore(self.run_dir, keep=config.trainer.max_actor_ckpt_to_keep)
        self.stop, self.health = GracefulStop(), Health()
        self.crossed: set[str] = set()  # the bounds that the last step crossed, which was warned of
        self.step = self.total_steps = 0
        # That the epochs hold, where they decide when the run ends
        self.ordinals: float = float("inf")
        self.stream: PromptStream | None = None  # once it is known
        url = config.trainer.default_local_dir
        self.remote = RemoteCopy(url, self.store) if is_url(url) else None
        self.updating = False  # since the last complete step: weights may be of no step
        self.saved_step: int | None = None
        # In its folder, so that resume_mode=auto goes on with this run
        self.has_own_checkpoint = False
        self.workers: Workers | None = None
        self.contents: Mapping[str, list[str]] = {}
        self.changes: Sequence[Change] = ()  # since the checkpoint that the run goes on from
        self.tracker: Tracker | None = None
        self.saving_s = 0.0  # of checkpoints since the last line of metrics
        self.line_ended = time.perf_counter()

    # -- starting --------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Check loggers and the URLs that the run writes to, and fetch what is newer at the run
        folder's URL than here.

        Before anything opens a file of the run folder. Raises InputError.
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
        folder = self.run_dir if self.trainer.resume_mode == "auto" else None
        if self.trainer.resume_mode == "resume_path" and self.trainer.resume_from_path:
            folder = Path(self.trainer.resume_from_path).expanduser().parent
        record = folder and folder / "config.yaml"
        if record is None or not record.is_file():
            return None
        data = (yaml.safe_load(record.read_text(encoding="utf-8")) or {}).get("data") or {}
        day = data.get("chat_template_date")
        return day and str(day)

    def open(self, stream: PromptStream, *, critic: bool) -> Checkpoint | None:
        """Return the checkpoint to resume from, if any. :meth:`count_steps` came before; no model
        is loaded yet.

        Raises InputError where the checkpoint is damaged, or is of a run with another base, other
        data or another objective.
        """
        trainer, batch_size, prompts = self.trainer, self.config.data.train_batch_size, len(stream)
        self.stream = stream
        self.contents = {**run_manifest.contents(self.config), **bases(self.config)}
        checkpoint = resolve_resume(trainer, self.store)
        if checkpoint is not None:
            if critic and not (checkpoint.folder / "critic").is_dir():
                rule = "this run trains a critic, which algorithm.adv_estimator decides"
                raise InputError(
                    f"{checkpoint.folder} holds none: {rule}; set it to that of the "
                    f"run that wrote it"
                )
            self._compare(checkpoint)
            own = checkpoint.folder.parent == self.store.root
            if (
                self.remote is not None
                and own
                and not trainer.val_only
                and self.remote.newest < checkpoint.step
            ):
                self.remote.send(checkpoint.step)  # a run that was killed before it had sent it
        if min(batch_size, self.ordinals) > prompts:
            log.warning(
                "data.train_batch_size=%d: a step repeats some of the %d prompts",
                batch_size,
                prompts,
            )
        if trainer.save_freq == 0 and not trainer.val_only:
            log.warning(
                "trainer.save_freq=0: no checkpoint is written, and no weights are kept "
                "(-1 keeps the last)"
            )
        print(f"writes to {self.run_dir}", flush=True)
        return checkpoint

    def count_steps(self, stream: PromptStream) -> None:
        """Count the steps of the run. Raises InputError where an epoch has no whole batch."""
        trainer, prompts = self.trainer, len(stream)
        batch_size = self.config.data.train_batch_size
        self.total_steps = trainer.total_training_steps
        if self.total_steps is None:
            self.total_steps = stream.steps(trainer.total_epochs, batch_size)
            self.ordinals = trainer.total_epochs * prompts
        if self.total_steps == 0:
            rule = f"an epoch has only {prompts} prompts"
            fix = "lower it, or set trainer.total_training_steps"
            raise InputError(f"data.train_batch_size={batch_size}: {rule}; {fix}")

    def _compare(self, checkpoint: Checkpoint) -> None:
        """Compare the run with the checkpoint, as far as the run is known. Raises InputError."""
        saved = checkpoint.provenance
        allow = self.trainer.resume_with_changes or self.trainer.val_only  # which trains nothing
        self.changes = check_resume(checkpoint.folder, saved, self.provenance(saved), allow=allow)
        for change in self.changes:
            if change.key in ADAPTER_KEYS and (
                self._adapts(change.key) or change.key.endswith("rank")
            ):
                raise InputError(
                    f"{change}: {checkpoint.folder} has other weights and another optimizer than "
                    f"these adapters; take "
                    "the change back, or export it (python -m core.export) and start a new run "
                    "from the export"
                )

    def _adapts(self, key: str) -> bool:
        return convert.get(self.config, f"{key.rpartition('.')[0]}.lora_rank") > 0

    def attach(self, workers: Workers, checkpoint: Checkpoint | None) -> LoopState:
        """Take the models into the run and return the state to go on from, as if the run had never
        stopped."""
        self.workers = workers
        self.contents |= bases(self.config)  # of a hub id only now on this machine
        if checkpoint is None:
            return self.state
        self._compare(checkpoint)
        if self.changes:
            changed = "; ".join(map(str, self.changes))
            log.warning(
                "resuming %s with changes, so not to the bit: %s", checkpoint.folder, changed
            )
        workers.load(checkpoint.folder)
        saved = run_state.DriverState.load(checkpoint.folder, self.stream.prompt)
        self.step = self.saved_step = saved.step
        self.has_own_checkpoint = checkpoint.folder.parent == self.store.root
        self.health = Health(**saved.values["health"])
        # 0 trains no answers of an older policy
        carried = saved.carried if self.trainer.max_staleness else {}
        collect = CollectState(saved.next_ordinal, saved.values["keep_rate"], carried)
        if self.stream.keeps_tail and self.trainer.total_training_steps is None:
            # The run may have ended with a short batch, and have got more epochs since.
            batch_size, epochs = self.config.data.train_batch_size, self.trainer.total_epochs
            self.total_steps = self.step + self.stream.steps(epochs, batch_size, saved.next_ordinal)
        self.state = LoopState(
            self.state.kl_controller.with_state(saved.values["kl_controller"]), collect
        )
        run_state.set_rng_state(run_state.load_tensors(checkpoint.folder / "rng.pt"))
        checkpoint.release()
        log.info("resumed after step %d from %s", self.step, checkpoint.folder)
        return self.state

    def provenance(self, saved: Provenance | None = None) -> Provenance:
        """Return which run this is. Until there are workers, ranks and threads are taken to be
        those ``saved``."""
        processes = self.workers or saved
        ranks, threads = (processes.ranks, processes.threads) if processes else (0, 0)
        run = {
            "seed": self.trainer.seed,
            "config": convert.as_json(self.config),
            "contents": self.contents,
        }
        return Provenance(ranks=ranks, threads=threads, **run)

    # -- around the loop -------------------------------------------------------------------------

    @contextmanager
    def running(self, *owned: Any) -> Iterator[asyncio.Runner]:
        """Hold signals, event loop and tracker for the time of the loop, then close them and what
        is ``owned``.

        The run's status in its manifest is how the block ended. A requested stop saves first and
        does not raise; what ends the run while a step collects saves the complete steps first, and
        is raised again.
        """
        self.tracker, status = self._open_tracker(), "failed"
        try:
            with memory_phase("update_weights"), self.stop, asyncio.Runner() as runner:
                try:
                    yield runner
                    status = "finished"
                except StopRequested:
                    self.save()
                    status = "stopped"
                    same = self.trainer.resume_mode == "auto" or not self.has_own_checkpoint
                    resume = "" if same else " with trainer.resume_mode=auto"
                    text = "stopped after step %d of %d (%s); the same command continues%s"
                    log.warning(text, self.step, self.total_steps, self.stop.cause, resume)
                except UnhealthyRun as error:
                    if not self.updating:
                        raise
                    raise UnhealthyRun(
                        f"stopped in step {self.step + 1}: {error}; {self._newest()}"
                    ) from error
                except Exception as error:
                    self._save_complete_steps(error)
                    raise
        except Exception as error:
            unhealthy = isinstance(error, UnhealthyRun)
            status = "stopped" if unhealthy else status
            kind = "" if unhealthy else f"{type(error).__name__}: "
            self.tracker.manifest["stopped_because"] = printable(f"{kind}{message_of(error)}")
            raise
        finally:
            self.tracker.close(status)
            if self.remote is not None and not self.trainer.val_only:
                try:
                    self.remote.send_files()
                except InputError as error:  # how the run ended must not be hidden by it
                    log.warning("%s", error)
            for part in owned:
                if part is not None:
                    part.close()

    def _newest(self) -> str:
        if self.saved_step is None:
            return "no checkpoint was written: begin again"
        return (
            f"the newest checkpoint is that of step {self.saved_step}: the run goes on from it "
            f"with other settings by "
            "trainer.resume_with_changes=True"
        )

    def _save_complete_steps(self, error: Exception) -> None:
        """Save before an error ends the run, unless weights or processes are not those of a
        complete step any more."""
        if self.updating or isinstance(error, WorkersLost | WriteFailed):
            return
        try:
            self.save()
        except Exception as failed:  # must not hide why the run ends
            log.warning("step %d is not saved (%s: %s)", self.step, type(failed).__name__, failed)

    def _open_tracker(self) -> Tracker:
        only_validates = self.trainer.val_only
        folder = self.run_dir / f"val_only_step_{self.step}" if only_validates else self.run_dir
        if self.finished() and not only_validates:
            text = (
                "the run is finished: step %d of %d is done; raise "
                "trainer.total_training_steps or total_epochs"
            )
            log.warning(text, self.step, self.total_steps)
        resume_step = self.step if self.saved_step is not None and not only_validates else None
        models = {
            name: {"path": convert.get(self.config, key), "sha256": self.contents[key][0]}
            for name, key in MODELS.items()
            if key in self.contents
        }
        changes = {change.key: [change.there, change.here] for change in self.changes}
        recipe = recipe_of(self.config, self.run_dir)  # of a folder in it, where it only validates
        tracker = Tracker(folder, self.config, resume_step, recipe, models=models, changes=changes)
        if nodes := getattr(self.workers, "nodes", ()):  # of a cluster
            tracker.manifest["sessions"][-1]["nodes"] = nodes
        if not only_validates:
            tracker.set_total(self.total_steps)
        return tracker

    def steps(self) -> Iterator[StepMetrics]:
        """Yield the metrics of each step to come, empty, until the run is finished."""
        self.line_ended = time.perf_counter()
        while not self.finished():
            yield StepMetrics(self.step + 1)

    def finished(self) -> bool:
        """Return whether no step is left; with dynamic sampling the epochs may run out of prompts
        before."""
        return self.trainer.val_only or self.is_last(self.step, self.state)

    def is_last(self, step: int, state: LoopState) -> bool:
        """Return whether no step follows: the last one is done, or the epochs have no prompt
        left."""
        return step >= self.total_steps or state.collect.next_ordinal >= self.ordinals

    def is_due(self, frequency: int, step: int, state: LoopState) -> bool:
        """Return whether something that happens every ``frequency`` steps, and after the last,
        happens now."""
        return frequency > 0 and (step % frequency == 0 or self.is_last(step, state))

    def lacks_validation(self) -> bool:
        """Return whether the last recorded step was due a validation and has none: a stop cut it
        short."""
        recorded = 0 < self.step == self.tracker.last_step
        due = self.is_due(self.trainer.test_freq, self.step, self.state)
        due = due and bool(self.config.data.val_files)
        return recorded and due and not self.tracker.has_validation(self.step)

    def complete(self, metrics: StepMetrics, state: LoopState) -> None:
        """Record the step, save it where due, and stop an unhealthy run.

        The line is on disk before the checkpoint that it belongs to. Raises UnhealthyRun.
        """
        save_is_due = self._save_is_due(metrics.step, state)
        self.step = metrics.step
        self.state = state
        self.updating = False
        faults = self._check_health(metrics)
        if self.saving_s:
            metrics.add({"timing_s/save_checkpoint": self.saving_s})
        now = time.perf_counter()
        # Since the line before; a checkpoint is on the next one
        metrics.add({"timing_s/whole": now - self.line_ended})
        metrics.add({"timing_s/other": time_parts(metrics.values)[REST]})
        self.line_ended, self.saving_s = now, 0.0
        self.tracker.log(metrics)
        if save_is_due:
            try:
                self.save()
            except WriteFailed as error:
                if self.finished():
                    raise
                # A run of days may find room before its next save
                log.warning("%s. Training goes on, and the next checkpoint is another try", error)
        if NONFINITE in faults:
            self._stop_unhealthy(faults[NONFINITE])

    def _save_is_due(self, step: int, state: LoopState) -> bool:
        """Return whether a checkpoint follows the step that led from the run's state to this
        one."""
        frequency = self.trainer.save_freq
        if frequency == "after_each_epoch":
            size = len(self.stream)
            before, after = (each.collect.next_ordinal // size for each in (self.state, state))
            return after > before or self.is_last(step, state)
        return self.is_due(frequency, step, state) or (frequency < 0 and self.is_last(step, state))

    def outcome(self) -> str:
        """Return how the run ended, in a few words."""
        if self.trainer.val_only:
            return f"validated after step {self.step}"
        return (
            f"{'finished' if self.finished() else 'stopped'} after step {self.step} of "
            f"{self.total_steps}"
        )

    def save(self) -> None:
        """Write a checkpoint of the last complete step, unless there is one, and send it to the run
        folder's URL.

        A run that is killed before it is complete resumes from the one before. Raises WriteFailed.
        """
        if self.step in (0, self.saved_step):
            return
        start, collect = time.perf_counter(), self.state.collect
        kl_controller, health = (
            self.state.kl_controller.state_dict(),
            dataclasses.asdict(self.health),
        )
        values = {"keep_rate": collect.keep_rate, "health": health, "kl_controller": kl_controller}
        state = run_state.DriverState(
            self.step, collect.next_ordinal, carried=collect.carried, values=values
        )
        hashes: dict[str, str] = {}
        with (
            memory_phase("save_checkpoint"),
            self.store.writing(self.step, self.provenance(), hashes) as folder,
        ):
            hashes.update(self.workers.save(folder))
            state.save(folder)
            run_state.save_tensors(folder / "rng.pt", run_state.rng_state())
        self.saved_step, self.has_own_checkpoint = self.step, True
        if self.remote is not None:
            self.remote.send(self.step)
        self.saving_s += time.perf_counter() - start

    # -- health ----------------------------------------------------------------------------------

    def _check_health(self, metrics: StepMetrics) -> Mapping[str, str]:
        """Compare the step with ``trainer.health``, warn of bounds that are newly crossed, and
        return all of those."""
        faults = self.health.check(self.step, metrics.values, self.trainer.health)
        last = self.health.last_healthy_step
        metrics.add({"health/crossed_bounds": len(faults), "health/last_healthy_step": last})
        self.tracker.manifest["last_healthy_step"] = last
        for check, text in faults.items():
            if check not in self.crossed:
                log.warning("step %d: %s (last healthy step %d)", self.step, text, last)
        self.crossed = {*faults}
        if reason := self.health.stuck():
            log.warning("step %d: %s", self.step, reason)
        return faults

    def _stop_unhealthy(self, text: str) -> NoReturn:
        """Save and raise UnhealthyRun."""
        saved = f"saved in {self.store.folder(self.step)}"
        try:
            self.save()
        except WriteFailed as error:  # must not hide why the run stops
            saved = f"not saved ({error})"
        back = (
            f"the last healthy step is {self.health.last_healthy_step}, "
            f"trainer.resume_from_path goes back to one"
        )
        raise UnhealthyRun(f"stopped after step {self.step}, {saved}: {text}; {back}")


def prepare_torch(trainer: TrainerConfig) -> torch.device:
    """Set threads and seeds, and return the device. With equal ones a run on the CPU repeats to the
    bit."""
    torch.set_num_threads(trainer.cpu_threads or os.cpu_count() or 1)
    run_state.seed_generators(trainer.seed)
    return torch.device(trainer.device or ("cuda" if torch.cuda.is_available() else "cpu"))


# -- signals --------------------------------------------------------------------------------------

# Ctrl-C; a scheduler's end of a job, and its warning before
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Within which a scheduler's signal that comes again is the same one: srun and shells pass them on
SAME_S = 10.0
ENDED_BY_SIGNAL = 128  # plus its number: what shells report for a program that a signal ended
FIRST = (
    ": finishing this step, then saving a checkpoint; the same command continues from it. "
    "Once more stops at once."
)
AGAIN = (
    " again: stopping at once; the last complete checkpoint stands, and the same command "
    "continues from it"
)


class GracefulStop:
    """Turns signals into ``requested``, which the loop reads while a step collects and at its end.

    The same signal within ``SAME_S`` counts once, Ctrl-C excepted. A second signal ends the process
    at once with status 128 plus its number, without clean-up: the checkpoint layer expects no
    better. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self.cause = ""  # the signal's name, where it was one
        self._heard_at = 0.0  # when the last signal came
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child inherits this handler: it must die of terminate(), and leave a Ctrl-C
            # to its parent.
            if number == signal.SIGTERM:
                os._exit(ENDED_BY_SIGNAL + number)
            return
        name, now = signal.Signals(number).name, time.monotonic()
        if (
            self.requested
            and number != signal.SIGINT
            and name == self.cause
            and now - self._heard_at < SAME_S
        ):
            return
        again = self.requested
        self.requested = True
        self.cause = name
        self._heard_at = now
        with suppress(OSError):  # nobody may read it any more
            # Safe while it interrupts a print
            os.write(2, f"\n{self.cause}{AGAIN if again else FIRST}\n".encode())
        if again:
            os._exit(ENDED_BY_SIGNAL + number)
