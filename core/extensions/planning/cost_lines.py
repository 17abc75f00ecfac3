"""The cost of a run in one line, which a start and a dry run print, and the whole plan of a dry run.

There is a line only where the cost is known: for a model whose shape is known offline, on a GPU of the table that this
machine has (or that a dry run plans for).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from core.config.paths import is_local
from core.config.schema import Config
from core.errors import InputError
from core.extensions.planning.estimate import DEFAULT_GPU, Plan, lines, plan_on
from core.extensions.planning.model_shapes import TABLE, Gpu, gpu, shape_of
from core.tracking.step_time import duration

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")  # GPUs without torch
SMALL = 1e8  # parameters; a model with fewer is a lab's
MEMORY_TOLERANCE = 0.1  # of the table's usable memory; it tells GPUs of one name and two sizes apart


def cost_lines(config: Config, dry: bool) -> list[str]:
    """Return the line of a run's cost: on the default GPU of plans in a dry run, else on this machine's."""
    on = gpu(DEFAULT_GPU) if dry else gpu_here(config)
    if on is None or config.trainer.val_only or small(config):
        return []
    try:
        plan = Plan(config, on)
    except InputError:
        return []
    step, steps, where = sum(plan.seconds.values()), config.trainer.total_training_steps, f"{plan.gpus} x {on.name}"
    memory = f"{max(plan.phase_bytes.values()) / 2**30:.0f} GiB a GPU on {where}"
    if not plan.fits:
        memory = f"does not fit on {where}, DRY_RUN=1 prints the plan"
    whole = f", the run about {duration(steps * step)}" if steps else ""
    return [f"the cost, estimated: {memory}; a step about {duration(step)}{whole}"]


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


def plan_lines(config: Config) -> list[str]:
    """Return the plan's lines, or one that gives the reason why there is none: what a dry run prints."""
    if config.trainer.val_only:
        return ["none: a plan is of training, and trainer.val_only trains nothing"]
    if config.trainer.device == "cpu":
        return []  # the plan's rates are of GPUs
    try:
        return [] if small(config) else lines(plan_on(config))
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
