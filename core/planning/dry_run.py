"""What a dry run prints of a run's cost. A start prints nothing of it."""

from __future__ import annotations

from pathlib import Path

from core.config.paths import is_local
from core.config.schema import Config
from core.errors import InputError
from core.planning.estimate import lines, plan_on
from core.planning.model_shapes import shape_of

SMALL = 1e8  # parameters; a model with fewer is a lab's


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
