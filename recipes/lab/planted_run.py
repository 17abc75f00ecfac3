"""GRPO with a known bug, or with other seeds: the runs by which a task shows what it can tell apart.

    python -m recipes.lab.planted_run preset=... plant=rewards_of_others seed_offset=100 ...

``plant`` names a bug of the museum (``tests/museum/bugs.yaml``). The invariants that would end such a run are off for
its time: the question here is what the accuracy shows. ``seed_offset`` is added to ``trainer.seed``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

from core import launch

MUSEUM = "tests.museum.mutations"  # loaded by its name: recipes import no tests


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of the configuration, with the seed that is meant, and the two of this module."""
    given = dict(one.split("=", 1) for one in arguments)
    own = {key: given.pop(key) for key in ("plant", "seed_offset") if key in given}
    if "seed_offset" in own:
        given["trainer.seed"] = str(int(given["trainer.seed"]) + int(own["seed_offset"]))
    return [f"{key}={value}" for key, value in given.items()], own


@contextlib.contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Plant the bug and switch the invariants off, for the time of the block."""
    if bug is None:
        yield
        return
    with mock.patch("core.algorithm.invariants._require"), importlib.import_module(MUSEUM).planted(bug):
        yield


if __name__ == "__main__":
    arguments, own = split(sys.argv[1:])
    sys.argv = [sys.argv[0], *arguments]
    with planted(own.get("plant")):
        launch.main("grpo")
