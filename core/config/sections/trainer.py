"""The sections ``trainer``, ``ray_kwargs`` and ``global_profiler`` with their rules."""

from __future__ import annotations

from typing import Literal

from core.config import registry, when
from core.config.limits import Count, Name, NonNegative, OffOrCount, Positive, Size
from core.config.registry import Logger
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import ARGUMENTS, FrozenDict, Open, Section, bookkeeping, execution, key


class HealthBound(Section):
    bound: NonNegative | None = key(None, "the bound that such a number may not cross; null: off")
    action: Literal["warn", "stop"] = key(
        "warn", "what a crossed bound does; stop saves a checkpoint first", when.BOUNDED
    )


class HealthConfig(Section):
    """What a step's metrics may be; see core.tracking.health for what each bound is compared with."""

    nonfinite: HealthBound = key(HealthBound(bound=3, action="stop"), "steps in a row that skipped an update")
    entropy: HealthBound = key(HealthBound(), "least mean entropy, nats a token")
    reward_drop: HealthBound = key(HealthBound(), "drop of the mean score below its best")
    reward_window: Count = key(10, "steps over which reward_drop and scorer_errors average", when.WINDOW)
    logp_diff: HealthBound = key(
        HealthBound(),
        "mean |engine - learner| of log-probs; null: 1e-4 in float32, else by what rounding costs on the model, "
        "which is measured at start; off where the difference is corrected",
    )
    entropy_gap: HealthBound = key(HealthBound(bound=6), "standard errors between entropy and -log p of sampled tokens")
    zero_variance: HealthBound = key(HealthBound(), "share of groups of equal scores")
    repetition: HealthBound = key(HealthBound(bound=0.2), "rise of the share of repeated trigrams since the start")
    unfinished: HealthBound = key(HealthBound(bound=0.2), "rise of the share of answers that reach the length limit")
    shortening: HealthBound = key(HealthBound(bound=0.5), "fall of the mean response length, as a share of the start's")
    scorer_errors: HealthBound = key(HealthBound(bound=0.1), "share of answers without a score, over reward_window")


class TraceConfig(Section):
    """What is recorded of every token of some steps, for ``python -m results.trace``."""

    freq: OffOrCount = key(-1, "steps between records, first and last step included; -1: only trainer.trace.steps")
    steps: tuple[Count, ...] | None = key(None, "record these steps as well")
    groups: Count = key(
        2,
        "groups of a recorded step, the same questions in every step where possible; beside them the group of the "
        "lowest score, that of the largest engine-learner difference and the first one that was dropped",
        used_if=when.TRACED,
    )
    max_mb: Positive = key(256, "disk of a run's records; older ones make room, the first one stays", when.TRACED)

    @property
    def used(self) -> bool:
        """Whether any step is recorded."""
        return self.freq > 0 or bool(self.steps)


class TrainerConfig(Section):
    backend: Literal["local", "ray"] = execution("local", "one process, or ranks and engines on the GPUs of nodes")
    device: Literal["cpu", "cuda"] | None = execution(None, "where models compute; null: cuda if there is one")
    cpu_threads: Count | None = execution(None, "threads of torch on a CPU; null: all cores")
    seed: Size = key(1, "decides which examples are drawn, how answers are sampled, and new weights")
    nnodes: Count = execution(1, "machines", when.OVER_RAY)
    n_gpus_per_node: Count = execution(8, "GPUs a machine; on CPUs, learner ranks", when.OVER_RAY)
    total_epochs: Count = execution(30, "passes over the training examples", when.BY_EPOCHS)
    total_training_steps: Count | None = execution(None, "RL steps; null: the whole batches of total_epochs")
    phase_timeout_s: Positive = bookkeeping(3600, "seconds of a remote phase, after which the run ends", when.OVER_RAY)
    heartbeat_timeout_s: Positive = bookkeeping(
        300, "seconds without a sign of life, after which likewise", when.OVER_RAY
    )
    max_restarts: Size = bookkeeping(0, "times a run starts again from its checkpoint after a process died or hung")
    critic_warmup: Size = key(0, "steps in which only the critic trains", when.CRITIC)
    balance_batch: bool = execution(True, "give ranks about equal numbers of tokens", when.OVER_RAY)
    max_staleness: Size = key(0, "steps a sample may be old; 1: the next collection overlaps the update")
    project_name: Name | None = bookkeeping(None, "project at a logger's service; null: rlrepro-<recipe>")
    experiment_name: Name | None = bookkeeping(
        None, "name of the run; null: <model>-seed<seed> (core/config/README.md)"
    )
    reference: str | None = bookkeeping(None, "row of results/references.yaml that it reproduces; null: none")
    default_local_dir: str | None = bookkeeping(None, "run folder, or a URL; null: outputs/<recipe>/<experiment_name>")
    logger: tuple[Logger, ...] = bookkeeping(
        ("console", "tensorboard"),
        "where metrics go besides metrics.jsonl in the run folder; one that fails three times in a row is switched off",
    )
    log_val_generations: Size = bookkeeping(0, "answers of a validation that go to the loggers")
    rollout_data_dir: str | None = bookkeeping(None, "folder or URL for every training answer; null: no dump")
    validation_data_dir: str | None = bookkeeping(None, "folder or URL for every validation answer; null: no dump")
    val_before_train: bool = bookkeeping(True, "validate the starting model too", when.TRAINS)
    val_only: bool = bookkeeping(False, "validate the model and end")
    test_freq: OffOrCount = bookkeeping(-1, "steps between validations, one follows the last; -1: never")
    save_freq: OffOrCount = bookkeeping(-1, "steps between checkpoints, one follows the last; -1: never")
    max_actor_ckpt_to_keep: Count | None = bookkeeping(
        None, "checkpoints that are kept, the newest ones; null: all", when.SAVES
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = bookkeeping(
        "auto", "its newest checkpoint, step 0, or resume_from_path"
    )
    resume_from_path: str | None = bookkeeping(
        None, "folder or URL global_step_N of resume_mode=resume_path", when.RESUMES
    )
    resume_with_changes: bool = bookkeeping(False, "resume also with another base, data or objective; recorded")
    health: HealthConfig = bookkeeping(HealthConfig())
    trace: TraceConfig = bookkeeping(TraceConfig())


class GlobalProfilerConfig(Section):
    tool: Literal["torch"] | None = key(None, "profiler; null: no profile")
    steps: tuple[Count, ...] | None = key(None, "steps that are profiled", when.PROFILED)
    save_path: str | None = key(None, "folder of torch's traces; null: <run folder>/profile", when.PROFILED)


class RayKwargsConfig(Section):
    ray_init: Open = key(FrozenDict(num_cpus=None), "arguments of ray.init", code=ARGUMENTS)
    timeline_json_file: str | None = key(None, "file for Ray's timeline of the run; null: none")


rules = RuleBook()


@rules.problem
def staleness_and_resuming(c: View) -> Broken:
    if c.trainer.max_staleness > 0 and not c.corrects:
        yield (
            "trainer.max_staleness",
            "trains on samples of an older policy, and no rollout correction weighs for it; set "
            "algorithm.rollout_correction.rollout_is=token, or bypass_mode=True there",
        )
    if c.trainer.max_staleness > 1:
        yield (
            "trainer.max_staleness",
            "is at most 1: the next step's samples are drawn while this one updates, and no earlier; set 1, or 0 "
            "for samples of the policy that they train",
        )
    if c.trainer.resume_mode == "resume_path" and not c.trainer.resume_from_path:
        yield (
            "trainer.resume_from_path",
            "is needed with trainer.resume_mode=resume_path; name a checkpoint: <run>/global_step_N",
        )


@rules.problem
def ray_and_profiles(c: View) -> Broken:
    if unknown := ", ".join(name for name in c.ray.ray_init if name not in registry.RAY_INIT):
        yield (
            "ray_kwargs.ray_init",
            f"{unknown}: ray.init takes no such argument; it would fail when the run starts; "
            f"leave it out; its arguments are {', '.join(registry.RAY_INIT)}",
        )
    if (
        c.profiler.tool is not None
        and c.trainer.total_training_steps is not None
        and (max(c.profiler.steps or [0]) > c.trainer.total_training_steps)
    ):
        yield (
            "global_profiler.steps",
            f"goes beyond trainer.total_training_steps={c.trainer.total_training_steps}; name earlier steps",
        )
    if c.profiler.tool == "torch" and c.is_url(c.profiler.save_path):
        yield (
            "global_profiler.save_path",
            "is written by torch, which writes to no URL; leave it out; the traces are then in the run folder, "
            "and sent with it where that is a URL",
        )


@rules.warning
def profiles_of_no_step(c: View) -> Broken:
    if c.profiler.tool is not None and not c.profiler.steps:
        yield (
            "global_profiler.steps",
            f"names no step, so global_profiler.tool={c.profiler.tool} profiles nothing; set "
            "global_profiler.steps=[3,4], say; the first step is slower than the others",
        )
