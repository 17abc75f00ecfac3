"""The sections ``trainer``, ``ray_kwargs`` and ``global_profiler`` with their rules."""

from __future__ import annotations

from typing import Literal

from core.config import limits, registry
from core.config.frozen import FrozenDict
from core.config.names import Logger
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Open, Section
from core.config.sections.health import HealthConfig


class TraceConfig(Section):
    """What is recorded of every token of some steps, for ``python -m results.trace``."""

    freq: limits.OffOrCount = -1  # steps between records, first and last step included; -1: only trainer.trace.steps
    steps: tuple[limits.Count, ...] | None = None  # record these steps as well
    # groups of a recorded step, the same questions in every step where possible; beside them the group of the lowest
    # score, that of the largest engine-learner difference and the first one that was dropped are recorded
    groups: limits.Count = 2
    max_mb: limits.Positive = 256  # disk of a run's records; older ones make room, the first one stays

    @property
    def used(self) -> bool:
        """Whether any step is recorded."""
        return self.freq > 0 or bool(self.steps)


class TrainerConfig(Section):
    # one process, or learner ranks and engines on the GPUs of one or more nodes (ray)
    backend: Literal["local", "ray"] = "local"
    device: Literal["cpu", "cuda"] | None = None  # where models compute; None: cuda if there is one
    cpu_threads: limits.Count | None = None  # threads of torch on a CPU; None: all cores
    seed: limits.Size = 1  # decides which examples are drawn, how answers are sampled, and new weights
    nnodes: limits.Count = 1  # machines
    n_gpus_per_node: limits.Count = 8  # GPUs a machine; on CPUs, learner ranks
    total_epochs: limits.Count = 30  # passes over the training examples
    total_training_steps: limits.Count | None = None  # RL steps; None: the whole batches of total_epochs
    # seconds of a remote phase, after which the run ends and reports what hangs
    phase_timeout_s: limits.Positive = 3600
    heartbeat_timeout_s: limits.Positive = 300  # seconds without a sign of life from a process, after which likewise
    max_restarts: limits.Size = 0  # times a run starts again from its checkpoint after a process died or hung
    critic_warmup: limits.Size = 0  # steps in which only the critic trains
    balance_batch: bool = True  # give ranks about equal numbers of tokens
    max_staleness: limits.Size = 0  # steps a sample may be old; 1: the next collection overlaps the update
    project_name: limits.Name | None = None  # project at a logger's service; None: rlrepro-<recipe>
    experiment_name: limits.Name | None = None  # name of the run; None: <model>-seed<seed>, see core/config/README.md
    reference: str | None = None  # id of the row of results/references.yaml that the run is to reproduce; None: none
    default_local_dir: str | None = None  # run folder, or a URL; None: outputs/<recipe>/<experiment_name>
    # where metrics go besides metrics.jsonl in the run folder; one that fails three times in a row is switched off
    logger: tuple[Logger, ...] = ("console", "tensorboard")
    log_val_generations: limits.Size = 0  # answers of a validation that go to the loggers
    rollout_data_dir: str | None = None  # folder or URL for every training answer; None: no dump
    validation_data_dir: str | None = None  # folder or URL for every validation answer; None: no dump
    val_before_train: bool = True  # validate the starting model too
    val_only: bool = False  # validate the model and end
    test_freq: limits.OffOrCount = -1  # steps between validations, one follows the last; -1: never
    save_freq: limits.OffOrCount = -1  # steps between checkpoints, one follows the last; -1: never
    max_actor_ckpt_to_keep: limits.Count | None = None  # checkpoints that are kept, the newest ones; None: all
    # where a run starts: its newest checkpoint (auto), step 0 (disable), resume_from_path
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    # checkpoint to resume from (a folder or URL global_step_N), with resume_mode=resume_path
    resume_from_path: str | None = None
    resume_with_changes: bool = False  # resume also with another base, other data or another objective; recorded
    health: HealthConfig = HealthConfig()
    trace: TraceConfig = TraceConfig()


class GlobalProfilerConfig(Section):
    tool: Literal["torch"] | None = None  # profiler; None: no profile
    steps: tuple[limits.Count, ...] | None = None  # steps that are profiled
    save_path: str | None = None  # folder of torch's traces; None: <run folder>/profile


class RayKwargsConfig(Section):
    ray_init: Open = FrozenDict(num_cpus=None)  # arguments of ray.init
    timeline_json_file: str | None = None  # file for Ray's timeline of the run; None: none


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


@rules.unused
def one_process(c: View) -> Unused:
    if c.trainer.backend == "local":
        yield (
            (
                "trainer.nnodes",
                "trainer.n_gpus_per_node",
                "trainer.balance_batch",
                "ray_kwargs.*",
                "trainer.phase_timeout_s",
                "trainer.heartbeat_timeout_s",
                "*.fsdp_config.param_offload",
                "*.fsdp_config.optimizer_offload",
                "*.fsdp_config.offload_policy",
                "*.fsdp_config.reshard_after_forward",
                "*.fsdp_config.forward_prefetch",
                "*.fsdp_config.fsdp_size",
                "actor_rollout_ref.ref.fsdp_config.dtype",
                "*.ulysses_sequence_parallel_size",
                "actor_rollout_ref.rollout.tensor_model_parallel_size",
                "*.strategy",
                "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
            ),
            "trainer.backend=local runs one rank in this process",
        )


@rules.unused
def profiles(c: View) -> Unused:
    if c.profiler.tool is None:
        yield (("global_profiler.*",), "global_profiler.tool is not set")


@rules.unused
def lengths_and_checkpoints(c: View) -> Unused:
    if c.trainer.total_training_steps is not None:
        yield (("trainer.total_epochs",), "trainer.total_training_steps is given")
    if c.trainer.resume_mode != "resume_path":
        yield (("trainer.resume_from_path",), "trainer.resume_mode is not resume_path")
    if c.trainer.save_freq == -1:
        yield (("trainer.max_actor_ckpt_to_keep",), "trainer.save_freq is off")
    if c.trainer.val_only:
        yield (("trainer.val_before_train",), "trainer.val_only is on")


@rules.unused
def nothing_is_recorded(c: View) -> Unused:
    if not c.trainer.trace.used:
        yield (
            ("trainer.trace.groups", "trainer.trace.max_mb"),
            "neither trainer.trace.freq nor trainer.trace.steps is set",
        )
