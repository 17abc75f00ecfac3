"""What surrounds the loop: starting, resuming, validating, saving and stopping a run."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.algorithm import advantages
from core.algorithm.kl import KLController
from core.checkpoint import run_state
from core.checkpoint.kill_points import kill_point
from core.checkpoint.provenance import Provenance
from core.checkpoint.store import CheckpointStore, resolve_resume
from core.cluster.local_workers import LocalWorkers
from core.cluster.signals import GracefulStop
from core.cluster.workers import Workers, ray_backend
from core.config import convert
from core.data.stream import PromptStream, load_val_prompts
from core.engines import SamplingParams
from core.engines.stepped import SteppedEngine
from core.errors import InputError
from core.learner.models import load_tokenizer
from core.learner.saving import planned_fingerprints
from core.rewards import RewardLayer
from core.rewards.examine import examined
from core.rewards.hook_check import rehearse
from core.rollout.agent_loop import Episode, Limits, ToolCalls, make_agent_loop
from core.rollout.collect import CollectState, StopRequested, fresh_enough
from core.tracking import profiling, step_time
from core.tracking.health import Crossing, Health, UnhealthyRun
from core.tracking.metrics import data_metrics
from core.tracking.step_time import BusyClock
from core.tracking.tracker import Tracker, dump_jsonl, generation_row
from core.tracking.validation import ValRecord, validation_metrics
from core.types import Prompt, ScoredGroup, StepMetrics, TrainBatch, Trajectory
from reward_scores.score import Score

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)


WHERE_FROM = ("trainer.resume_mode", "trainer.resume_from_path")  # of a process, not of the run that it works on


@dataclass(frozen=True)
class Needs:
    """Which parts of a step the configuration makes necessary."""

    critic: bool
    ref: bool
    baseline: bool  # a greedy answer to every prompt
    every_old_log_prob: bool
    no_old_log_prob: bool  # the engine's stand for them
    prompts_per_optimizer_step: int

    @classmethod
    def of(cls, config: Config) -> Needs:
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        correction = algorithm.rollout_correction
        estimator = advantages.NEEDS.get(algorithm.adv_estimator, advantages.Needs())
        return cls(
            critic=estimator.critic,
            ref=algorithm.use_kl_in_reward or actor.use_kl_loss,
            baseline=estimator.greedy_baseline,
            every_old_log_prob=algorithm.use_kl_in_reward or actor.ppo_epochs > 1 or correction.uses_old_log_probs,
            no_old_log_prob=correction.bypass_mode,
            prompts_per_optimizer_step=actor.ppo_mini_batch_size,
        )

    def old_log_probs(self, batch: TrainBatch) -> bool:
        """Whether the step needs a pass for the old log-probs: not if it makes one optimizer step of the batch."""
        if self.no_old_log_prob:
            return False
        return self.every_old_log_prob or int(batch.group.max()) >= self.prompts_per_optimizer_step


def _all_of(waits: Sequence[Callable[[], Awaitable[bool]]]) -> Callable[[], Awaitable[bool]] | None:
    """Awaits each of them; whether any had news."""

    async def wait() -> bool:
        return any([await one() for one in waits])

    return wait if waits else None


class Run:
    """State and surroundings of a run; :class:`core.ray_trainer.RayPPOTrainer` adds the loop."""

    # The trainer's
    evaluate: Callable[[], Awaitable[list[ScoredGroup]]]
    shape_reward: Callable[[Score, Trajectory], Score]
    keep_group: Callable[[ScoredGroup], bool]

    def __init__(self, config: Config):
        self.config = config
        self.run_dir = Path(config.trainer.default_local_dir)
        self.needs = Needs.of(config)
        self.step = 0  # complete steps
        self.saved_step: int | None = None
        self.collect_state = CollectState()
        self.stop = GracefulStop()
        self.health = Health()
        self.saving_s = 0.0  # of checkpoints since the last line of metrics
        ctrl = config.algorithm.kl_ctrl
        self.kl_controller = KLController(ctrl.type, ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)
        rollout = config.actor_rollout_ref.rollout
        self.train_sampling = self.sampling(rollout, rollout.do_sample)
        self.val_sampling = self.sampling(rollout.val_kwargs, rollout.val_kwargs.do_sample)
        self.state_masking = config.actor_rollout_ref.actor.state_masking

    def sampling(self, part: Any, do_sample: bool) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.config.data.max_response_length,
            temperature=part.temperature if do_sample else 0.0,
            top_p=part.top_p if do_sample else 1.0,
            top_k=part.top_k if do_sample else -1,
            ignore_eos=self.config.actor_rollout_ref.rollout.ignore_eos,
        )

    # -- starting --------------------------------------------------------------------------------

    def init_workers(self) -> Run:
        """Checks the data, the scorers and the checkpoint, then loads the models and resumes.

        Raises InputError, InputError, InputError or InputError, the first three before a model loads, and
        what a training hook raises on an example answer.
        """
        config = self.config
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        self.stream = PromptStream(config.data, self.tokenizer, config.trainer.seed)
        self.val_prompts = load_val_prompts(config.data, self.tokenizer)
        self.reward = RewardLayer(config, self.tokenizer)
        self.reward.check(itertools.chain(self.stream.files.examples(), self.val_prompts))
        rehearse(self.stream.files.sample_examples(1), self.reward, self.tokenizer, self.shape_reward, self.keep_group)
        self.total_steps = self.count_steps()
        self.open_agent_loop()
        keep = config.trainer.max_actor_ckpt_to_keep
        self.store = CheckpointStore(self.run_dir, keep=keep)
        checkpoint = resolve_resume(config.trainer, self.store)
        if checkpoint is not None:
            checkpoint.check_models(planned_fingerprints(config, critic=self.needs.critic))
        self.prepare_torch()
        self.workers = self.make_workers()
        try:
            if self.workers.judge is not None:
                self.reward.attach(self.workers.judge)
            if checkpoint is not None:
                self.resume(checkpoint)
        except BaseException:
            self.workers.close()
            raise
        self.make_collecting_repeatable()
        # Scoring in this process holds an engine in this process up; else what decodes meanwhile hides it.
        blocks = self.reward.in_process and isinstance(self.workers.engine, SteppedEngine)
        self.clock = BusyClock("reward", "decode") if blocks else BusyClock("decode", "reward")
        return self

    def open_agent_loop(self) -> None:
        """The loop that plays episodes, and its tools; None where a trajectory is one turn."""
        self.agent_loop, self.tool_calls = make_agent_loop(self.config, self.tokenizer), ToolCalls()

    def make_collecting_repeatable(self) -> None:
        """Where verdicts decide what is begun next, an engine in this process waits for them before each step; for
        tools it does where ``multi_turn.repeatable`` says so."""
        data, engine = self.config.data, self.workers.engine
        if not isinstance(engine, SteppedEngine):
            return
        waits = []
        in_flight = data.gen_batch_size or data.train_batch_size
        if self.config.algorithm.filter_groups.enable or in_flight < data.train_batch_size:
            waits.append(self.reward.in_waves())
        if self.agent_loop is not None and self.config.actor_rollout_ref.rollout.multi_turn.repeatable:
            waits.append(self.tool_calls.in_waves())
        engine.before_step = _all_of([wait for wait in waits if wait is not None])

    def episode(self, prompt: Prompt, sample_index: int, sampling: SamplingParams, limits: Limits) -> Episode:
        """A new episode of this run: its engine, its seeds, its tools."""
        parts = {"engine": self.workers.engine, "tokenizer": self.tokenizer, "calls": self.tool_calls}
        return Episode(prompt, sample_index, sampling, limits, run_seed=self.config.trainer.seed, **parts)

    async def play(self, episode: Episode) -> Trajectory:
        """The episode, played to its end by the agent loop."""
        await self.agent_loop.run(episode)
        return episode.trajectory()

    def make_workers(self) -> Workers:
        """The models and the engine, where ``trainer.backend`` says."""
        backend = ray_backend().RayWorkers if self.config.trainer.backend == "ray" else LocalWorkers
        needs = {"needs_ref": self.needs.ref, "needs_critic": self.needs.critic}
        return backend(self.config, self.tokenizer, self.device, **needs)

    def count_steps(self) -> int:
        """``trainer.total_training_steps``, or the whole batches of ``trainer.total_epochs`` epochs."""
        trainer, batch_size = self.config.trainer, self.config.data.train_batch_size
        if trainer.total_training_steps is not None:
            return trainer.total_training_steps
        steps = trainer.total_epochs * self.stream.steps_per_epoch(batch_size)
        if steps == 0:
            raise InputError(
                f"data.train_batch_size={batch_size}: an epoch has only {len(self.stream)} prompts; "
                "lower it, or set trainer.total_training_steps"
            )
        return steps

    def prepare_torch(self) -> None:
        """Threads and seeds: with equal ones a run on the CPU repeats to the bit."""
        trainer = self.config.trainer
        torch.set_num_threads(trainer.cpu_threads or os.cpu_count() or 1)
        run_state.seed_generators(trainer.seed)
        self.device = torch.device(trainer.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def provenance(self) -> Provenance:
        return Provenance(
            models=self.workers.fingerprints(),
            seed=self.config.trainer.seed,
            ranks=self.workers.ranks,
            threads=self.workers.threads,
            config={key: value for key, value in convert.as_json(self.config).items() if key not in WHERE_FROM},
        )

    def resume(self, checkpoint: Any) -> None:
        """Goes on after the checkpoint's step, as if the run had never stopped."""
        changed = checkpoint.check_compatible(self.provenance())
        if changed:
            log.warning("resuming %s with changes, so not to the bit: %s", checkpoint.folder, "; ".join(changed))
        self.workers.load(checkpoint.folder)
        state = run_state.DriverState.load(checkpoint.folder)
        self.step = self.saved_step = state.step
        self.collect_state = CollectState(state.next_ordinal, state.values["keep_rate"], state.carried)
        self.health = Health.of_state(state.values["health"])
        self.kl_controller = self.kl_controller.with_state(state.values["kl_controller"])
        run_state.set_rng_state(run_state.load_tensors(checkpoint.path("rng.pt")))
        log.info("resumed after step %d from %s", self.step, checkpoint.folder)

    # -- around the loop -------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Signals, event loop and tracker for the time of ``fit``; the run's status says how it ended."""
        only_validates = self.config.trainer.val_only
        folder = self.run_dir / f"val_only_step_{self.step}" if only_validates else self.run_dir
        if self.finished() and not only_validates:
            log.warning(
                "the run is finished: step %d of %d is done; raise trainer.total_training_steps or "
                "trainer.total_epochs to train on",
                self.step,
                self.total_steps,
            )
        resume_step = self.step if self.saved_step is not None and not only_validates else None
        self.tracker = Tracker(folder, self.config, resume_step=resume_step, recipe=self.run_dir.parent.name)
        if not only_validates:
            self.tracker.progress(self.total_steps)
        status = "failed"
        try:
            with self.stop, asyncio.Runner() as self.runner:
                try:
                    yield
                    status = "finished"
                except UnhealthyRun as error:
                    status = "stopped"
                    self.tracker.note("stopped_because", str(error))
                    raise
                except StopRequested:
                    status = "stopped"
                    self.save()
                    log.warning("stopped after step %d of %d; the same command goes on", self.step, self.total_steps)
        finally:
            self.tracker.close(status)
            self.workers.close()
            if self.agent_loop is not None:
                self.agent_loop.close()
            self.reward.close()

    def stop_requested(self) -> bool:
        return self.stop.requested

    def finished(self) -> bool:
        """Whether the last step is done; with dynamic sampling also when the epochs have no prompt left."""
        trainer = self.config.trainer
        if trainer.val_only or self.step >= self.total_steps:
            return True
        out_of_prompts = self.collect_state.next_ordinal >= trainer.total_epochs * len(self.stream)
        return trainer.total_training_steps is None and out_of_prompts

    def outcome(self) -> str:
        """How ``fit`` ended, in a few words."""
        if self.config.trainer.val_only:
            return f"validated after step {self.step}"
        return f"{'finished' if self.finished() else 'stopped'} after step {self.step} of {self.total_steps}"

    def is_due(self, frequency: int) -> bool:
        return frequency > 0 and (self.step % frequency == 0 or self.finished())

    def complete_step(self, groups_P: Sequence[ScoredGroup], batch: TrainBatch, metrics: StepMetrics) -> None:
        """Measures, validates, logs and saves. The line is on disk before the checkpoint that it belongs to."""
        trainer = self.config.trainer
        self.step = metrics.step
        self.describe(groups_P, batch, metrics)
        crossings = self.check_health(metrics)
        if trainer.rollout_data_dir or self.config.reward_model.num_examine:
            rows = self.generation_rows(groups_P)
            self.show(rows, self.config.reward_model.num_examine)
            if trainer.rollout_data_dir:
                dump_jsonl(trainer.rollout_data_dir, self.step, rows)
        if self.is_due(trainer.test_freq):
            self.validate(metrics)
        self.add_up_times(metrics)
        self.tracker.log(metrics)
        if self.is_due(trainer.save_freq):
            self.save()
        kill_point("between", self.step)
        self.stop_if_unhealthy(crossings, batch)

    def describe(self, groups_P: Sequence[ScoredGroup], batch: TrainBatch, metrics: StepMetrics) -> None:
        """Adds what the step's data and times say."""
        oldest = min(t.policy_version for group in groups_P for t in group.trajectories)
        if oldest < self.step - 1 - self.config.trainer.max_staleness:
            raise RuntimeError(
                f"step {self.step} trained on samples of policy {oldest}, older than max_staleness allows"
            )
        metrics.add(data_metrics(groups_P, batch))
        if self.agent_loop is not None:
            metrics.add(self.agent_loop.metrics())
        values = metrics.values
        metrics.add(
            {
                "training/global_step": self.step,
                "training/epoch": self.stream.epoch(groups_P[-1].prompt.ordinal),
                "perf/time_per_step": values["timing_s/step"],
                "perf/throughput": values["perf/total_num_tokens"] / values["timing_s/step"],
            }
        )

    def add_up_times(self, metrics: StepMetrics) -> None:
        """The seconds since the line before, and those that no phase had. A checkpoint is on the line after it."""
        now = time.perf_counter()
        if self.saving_s:
            metrics.add({"timing_s/save_checkpoint": self.saving_s})
        metrics.add({"timing_s/whole": now - self.line_ended})
        metrics.add({"timing_s/other": step_time.parts(metrics.values)[step_time.REST]})
        self.line_ended, self.saving_s = now, 0.0

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Profiles the step in every process that works on it, where ``global_profiler`` asks for it."""
        config = self.config.global_profiler
        if not profiling.wanted(config, step):
            yield
            return
        self.workers.start_profile()
        try:
            yield
        finally:
            self.workers.stop_profile(Path(config.save_path or self.run_dir / "profile"), f"step_{step}")

    def fresh_collect_state(self) -> CollectState:
        """What collecting may carry into the step under ``trainer.max_staleness``."""
        return fresh_enough(self.collect_state, self.step - self.config.trainer.max_staleness)

    # -- validation ------------------------------------------------------------------------------

    def validate_before_training(self) -> None:
        trainer = self.config.trainer
        if self.val_prompts and (trainer.val_only or (trainer.val_before_train and self.step == 0)):
            metrics = StepMetrics(self.step)
            self.validate(metrics)
            self.tracker.log(metrics)
        self.line_ended = time.perf_counter()

    def validate(self, metrics: StepMetrics) -> None:
        """Answers every validation prompt ``val_kwargs.n`` times; no hook that shapes or filters is called."""
        with metrics.time("testing"):
            groups = self.runner.run(self.evaluate())
        self.clock.take()  # of validation, which is one part of the step
        records = [ValRecord.of(group) for group in groups]
        metrics.add(validation_metrics(records))
        if self.agent_loop is not None:
            found = self.agent_loop.metrics().items()
            metrics.add({f"val-{name}": value for name, value in found if not name.startswith("timing_s/")})
        rows = self.generation_rows(groups)
        self.tracker.log_validation(metrics.step, records)
        self.tracker.log_samples(metrics.step, rows)
        self.show(rows, self.config.reward_model.val_num_examine)
        if self.config.trainer.validation_data_dir:
            dump_jsonl(self.config.trainer.validation_data_dir, metrics.step, rows)

    def show(self, rows: Sequence[dict[str, Any]], count: int) -> None:
        """Prints the first ``count`` answers of each data source."""
        if text := examined(rows, count):
            print(text, flush=True)

    def generation_rows(self, groups: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
        rows = []
        for group in groups:
            text = self.tokenizer.decode(group.prompt.token_ids)
            for trajectory, score in zip(group.trajectories, group.scores, strict=True):
                row = generation_row(self.step, group.prompt, text, trajectory, score)
                rows.append({**row, "ordinal": group.prompt.ordinal})
        return rows

    # -- saving and giving up --------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint of the last complete step, unless there is one."""
        if self.saved_step == self.step or self.step == 0:
            return
        start = time.perf_counter()
        state = run_state.DriverState(
            step=self.step,
            next_ordinal=self.collect_state.next_ordinal,
            carried=self.collect_state.carried if self.config.trainer.max_staleness else {},
            values={
                "keep_rate": self.collect_state.keep_rate,
                "health": self.health.state_dict(),
                "kl_controller": self.kl_controller.state_dict(),
            },
        )
        with self.store.writing(self.step, self.provenance()) as folder:
            self.workers.save(folder)
            state.save(folder)
            run_state.save_tensors(folder / "rng.pt", run_state.rng_state())
        self.saved_step = self.step
        self.saving_s += time.perf_counter() - start

    def check_health(self, metrics: StepMetrics) -> list[Crossing]:
        """Compares the step with ``trainer.health``; says what is beyond it, and which step was the last within."""
        self.health, crossings = self.health.after(self.step, metrics.values, self.config.trainer.health)
        last = self.health.last_healthy_step
        metrics.add({"health/crossed_bounds": len(crossings), "health/last_healthy_step": last})
        self.tracker.note("last_healthy_step", last)
        for crossing in crossings:
            log.warning("step %d: %s (last healthy step %d)", self.step, crossing.text, last)
        return crossings

    def stop_if_unhealthy(self, crossings: Sequence[Crossing], batch: TrainBatch) -> None:
        """Saves and raises UnhealthyRun where a bound with ``action=stop`` was crossed."""
        stopping = [crossing for crossing in crossings if crossing.action == "stop"]
        if not stopping:
            return
        self.save()
        if any(crossing.check == "nonfinite" for crossing in stopping):
            path = self.run_dir / f"nonfinite_step_{self.step}.pt"
            run_state.save_tensors(path, {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)})
        last = self.health.last_healthy_step
        sound = max((step for step in self.store.steps() if step <= last), default=None)
        back = "no checkpoint is that old" if sound is None else f"go back to it with {self.resume_from(sound)}"
        raise UnhealthyRun(
            f"stopped after step {self.step}, saved in {self.store.folder(self.step)}: "
            f"{'; '.join(crossing.text for crossing in stopping)}. The last healthy step is {last}: {back}. "
            "The same command goes on from here and stops again unless the bound is raised"
        )

    def resume_from(self, step: int) -> str:
        return f"trainer.resume_mode=resume_path trainer.resume_from_path={self.store.folder(step)}"
