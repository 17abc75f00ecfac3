"""The first lines of a run: what a step is, how long the run will be, where it writes and how to watch it.

They are printed before anything is loaded. Memory and time stand there only where they are known: for a model whose
shape is known offline, on a GPU of the table that this machine has (or that a dry run plans for).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from core.config import registry
from core.config.locations import is_url
from core.config.paths import is_local, run_folder
from core.config.schema import Config
from core.errors import InputError
from core.extensions.planning.estimate import DEFAULT_GPU, Plan, lines
from core.extensions.planning.model_shapes import TABLE, Gpu, gpu, shape_of

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")  # GPUs without torch
SMALL = 1e8  # parameters; a model with fewer is a lab's
MEMORY_TOLERANCE = 0.1  # of the table's usable memory; it tells GPUs of one name and two sizes apart


def first_lines(config: Config, on: Gpu | None) -> list[str]:
    """Return the lines; ``on`` is the kind of GPU that the run has, None where there is none or it is not known."""
    return [*([_validation(config)] if config.trainer.val_only else _training(config, on)), *_places(config)]


def small(config: Config) -> bool:
    """Return whether the model is a lab's, for which a plan says nothing: tiny, or a folder that is not there yet."""
    model = config.actor_rollout_ref.model
    if not is_local(model.path):
        return False
    if not (Path(model.path).expanduser() / "config.json").exists():
        return True
    try:
        return shape_of(model.path, model.override_config).parameters < SMALL
    except InputError:  # the plan names what is wrong with its sizes
        return False


def plan_lines(config: Config, name: str = DEFAULT_GPU) -> list[str]:
    """Return the plan's lines, or one that gives the reason why there is none: what a dry run prints."""
    if config.trainer.val_only:
        return ["none: a plan is of training, and trainer.val_only trains nothing"]
    try:
        return [] if small(config) else lines(Plan(config, gpu(name)))
    except InputError as error:
        return [f"none: {error}"]


def gpu_here(config: Config) -> Gpu | None:
    """Return this machine's GPU as the table has it; None on a CPU and for a GPU that the table lacks."""
    if config.trainer.device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=10, check=True)
        name, memory = done.stdout.splitlines()[0].rsplit(",", 1)
        return gpu_of(name, float(memory) * 2**20)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def gpu_of(name: str, memory: float) -> Gpu | None:
    """Return the table's GPU of a driver's name (``NVIDIA A100-SXM4-40GB``) with about so many bytes of memory."""
    words = re.split(r"[\s-]+", name)
    words += [one + other for one, other in zip(words, words[1:], strict=False)]  # RTX 4090
    known = [gpu(each) for each in TABLE["gpus"] if each.partition("-")[0] in words]
    near = [each for each in known if abs(each.memory - memory) < MEMORY_TOLERANCE * memory]
    return min(near, key=lambda each: abs(each.memory - memory), default=None)


def _training(config: Config, on: Gpu | None) -> Iterator[str]:
    plan = _plan(config, on)
    parts = [_trajectories(config), _updates(config)]
    if plan is not None:
        where = f"{plan.gpus} x {plan.gpu.name}"
        size = f"about {max(plan.phase_bytes.values()) / 2**30:.0f} GiB a GPU on {where}"
        parts.append(size if plan.fits else f"it does not fit on {where}, DRY_RUN=1 prints the plan")
        parts.append(f"about {duration(sum(plan.seconds.values()))}")
    yield f"a step: {'; '.join(parts)}"
    trainer, length = config.trainer, f"{config.trainer.total_epochs} epochs of the data"
    if steps := trainer.total_training_steps:
        length = f"{steps:,} step{'s' * (steps > 1)}"
        length += "" if plan is None else f", about {duration(steps * sum(plan.seconds.values()))}"
    validates = f"a validation every {trainer.test_freq} steps" if trainer.test_freq > 0 else "no validation on the way"
    saves = f"a checkpoint every {trainer.save_freq} steps" if trainer.save_freq > 0 else "no checkpoint"
    yield f"the run: {length}; {validates}; {saves}"


def _validation(config: Config) -> str:
    answers, files = config.actor_rollout_ref.rollout.val_kwargs.n, len(config.data.val_files)
    counted = f"{files} file{'s' * (files > 1)}, {answers} answer{'s' * (answers > 1)} a question"
    return f"the run: one validation on {counted}; trainer.val_only trains nothing"


def _trajectories(config: Config) -> str:
    """Return what a step collects: ``512 prompts x 16 answers = 8,192 trajectories``."""
    rollout, filters = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    prompts, answers = config.data.train_batch_size, rollout.n
    if not config.generates:
        return f"{prompts:,} demonstration{'s' * (prompts > 1)}"
    episode = f", episodes of at most {config.turns} turns" if config.turns > 1 else ""
    if rollout.agent_loop == "tool_agent":
        turns = rollout.multi_turn.max_assistant_turns
        episode = f", episodes with tools{f' of at most {turns} turns' if turns else ''}"
    elif rollout.agent_loop not in (None, registry.SINGLE_TURN) and not episode:
        episode = f", episodes of {rollout.agent_loop}"
    words = f"{prompts:,} prompt{'s' * (prompts > 1)} x {answers:,} answer{'s' * (answers > 1)}"
    text = f"{words} = {prompts * answers:,} trajectories{episode}"
    if filters.enable:
        most = filters.max_num_gen_batches * config.data.gen_batch_size
        text += f" of groups whose {filters.metric} differs, from at most {most:,} prompts drawn"
    return text


def _updates(config: Config) -> str:
    """Return the updates of a step, the critic's apart where they are others."""
    actor, critic, n = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.rollout.n

    def updates(mini: int, epochs: int) -> str:
        one = -(-config.data.train_batch_size // mini)
        count = f"{one * epochs:,} update{'s' * (one * epochs > 1)} of {mini * n:,}"
        return f"{count} ({epochs} epochs of {one:,})" if epochs > 1 else count

    policys = updates(actor.ppo_mini_batch_size, actor.ppo_epochs)
    critics = updates(critic.ppo_mini_batch_size, critic.ppo_epochs) if critic.enable else ""
    both = ", and as many of the critic" if critics == policys else f", and {critics} of the critic"
    return policys + (both if critics else "")


def _plan(config: Config, on: Gpu | None) -> Plan | None:
    """Return the plan where one says something: of a model of known shape that is no lab's."""
    try:
        return None if on is None or small(config) else Plan(config, on)
    except InputError:
        return None


def duration(seconds: float) -> str:
    """Return a time in the unit that a person would choose: ``84 s``, ``14 min``, ``3.5 h``."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _places(config: Config) -> Iterator[str]:
    folder, loggers = run_folder(config), config.trainer.logger
    sent = f", sent to {config.trainer.default_local_dir}" if is_url(config.trainer.default_local_dir) else ""
    yield f"writes to {folder}{sent}: metrics.jsonl has a line a step, samples.jsonl some answers of each validation"
    top = folder.parent if folder.is_absolute() else Path(*folder.parts[:1])  # of "." too, which has no parts
    curves = f"tensorboard --logdir {top}"
    if "tensorboard" not in loggers:
        shown = ",".join(dict.fromkeys([*loggers, "tensorboard"]))
        curves = f"{curves} (with trainer.logger=[{shown}])"
    console = "this log, " if "console" in loggers else ""
    yield f"to watch it: {console}tail -f {folder}/metrics.jsonl, {curves}"
