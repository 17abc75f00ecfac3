"""A recipe with a known bug, or with other seeds: the runs by which a task shows what it can tell apart.

    python -m recipes.lab.planted_run family=tallies plant=rewards_of_others seed_offset=100 trainer.seed=1 ...

``family`` names a module of tasks with room: its data are used, and the base model that belongs to the seed. ``plant``
names a bug of the museum (``tests/museum/bugs.yaml``). The invariants that would end such a run are off for its time:
the question here is what the accuracy shows. ``seed_offset`` is added to ``trainer.seed``; ``recipe`` is grpo unless
named.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

from core import launch
from core.config.recipes import trainer_of
from recipes.lab.families import BASES, OUTPUTS

MUSEUM = "tests.museum.mutations"  # loaded by its name: recipes import no tests


def settings(arguments: Sequence[str]) -> tuple[str, list[str], str | None]:
    """Return the recipe that the command means, the arguments of its configuration, and the bug to plant."""
    given = dict(one.split("=", 1) for one in arguments)
    recipe = given.pop("recipe", "grpo")
    family, bug = f"./{OUTPUTS / given.pop('family')}", given.pop("plant", None)
    seed = int(given.pop("trainer.seed", 1)) + int(given.pop("seed_offset", 0))
    meant = {
        "preset": "lab_families",
        "data.train_files": f"{family}/train.parquet",
        "data.val_files": f"{family}/test.parquet",
        "actor_rollout_ref.model.path": f"{family}/base/seed-{1 + (seed - 1) % BASES}/current",
        "trainer.seed": seed,
        **given,
    }
    return recipe, [f"{key}={value}" for key, value in meant.items()], bug


@contextlib.contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Plant the bug and switch the invariants off, for the time of the block."""
    if bug is None:
        yield
        return
    with mock.patch("core.algorithm.invariants.require"), importlib.import_module(MUSEUM).planted(bug):
        yield


if __name__ == "__main__":
    recipe, arguments, bug = settings(sys.argv[1:])
    sys.argv = [sys.argv[0], *arguments]
    with planted(bug):
        trainer, hooks = trainer_of(recipe)
        launch.main(recipe, trainer=trainer or launch.TRAINER, hooks=hooks)
