"""Kill a run at a named moment: ``python -m tests.faults.killing MODULE key=value ...`` runs a main
module, patched.

``RLREPRO_KILL_AT=update:3`` kills the process (SIGKILL, no clean-up of any kind) in step 3 as it
begins to update the policy. The kill-and-resume tests hit moments so that are too short to be hit
by chance. What is patched is named below; the code of a run knows nothing of it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "RLREPRO_KILL_AT"
PHASES = {
    "rollout": "after the step's first group was scored",
    "update": "before the policy's update",
    "sync": "after the update, before the engine has the new weights",
    "between": "after the step's metrics were written, before the next step",
    "checkpoint_write": "all files written, no manifest yet",
    "checkpoint_rename": "manifest written, the folder still under its temporary name",
    "checkpoint_tracker": "the folder has its final name, the tracker file still names the "
    "previous one",
    "checkpoint_prune": "an old folder is renamed for deletion and not deleted yet",
    "remote_manifest": "the checkpoint is complete here; its files are at the run folder's URL, "
    "the manifest is not",
}


def kill_at(phase: str, step: int) -> None:
    """Kill this process if ``RLREPRO_KILL_AT`` is ``<phase>:<step>``. Raises KeyError for a phase
    of no such name."""
    assert PHASES[phase]
    if os.environ.get(VARIABLE) == f"{phase}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, moment: Callable[..., None]) -> None:
    """Call ``moment`` with the arguments of a function of ``owner`` each time before it."""
    original = getattr(owner, name)

    def patched(*args: Any, **options: Any) -> Any:
        moment(*args, **options)
        return original(*args, **options)

    setattr(owner, name, patched)


def patch_checkpoints() -> None:
    from core.checkpoint import store
    from core.checkpoint.store import RemoteCopy

    def tracker(path: Any, text: str) -> None:
        if path.name == store.TRACKER:
            kill_at("checkpoint_tracker", int(text))

    def prune(self: Any) -> None:
        if any(self.root.glob(".tmp-*-deleted")):
            kill_at("checkpoint_prune", self.steps()[-1])

    def put(self: Any, name: str, content: Any) -> None:
        if name.endswith(f"/{store.MANIFEST}"):
            kill_at("remote_manifest", int(name.split("/")[0].removeprefix("global_step_")))

    before(store, "seal", lambda folder, step, *_: kill_at("checkpoint_write", step))
    before(
        store.CheckpointStore,
        "_publish",
        lambda self, folder, step: kill_at("checkpoint_rename", step),
    )
    before(store, "write_atomic", tracker)
    before(store.CheckpointStore, "_clear", prune)
    before(RemoteCopy, "put", put)


def patch_trainer(backend: str) -> None:
    """Patch the phases of a step, on the trainer and on the workers of a backend."""
    from core.ray_trainer import RayPPOTrainer
    from core.tracking.tracker import Tracker
    from core.types import StepMetrics

    if backend == "ray":
        from core.cluster.ray_workers import RayWorkers as Workers
    else:
        from core.cluster.workers import LocalWorkers as Workers
    steps = [0]  # whose metrics were begun
    before(StepMetrics, "__init__", lambda self, step, *_, **__: steps.append(step))
    before(Workers, "update_actor", lambda *_: kill_at("update", steps[-1]))
    update, roll, log = Workers.update_actor, RayPPOTrainer.generate_group, Tracker.log

    def updated(*args: Any) -> Any:
        found = update(*args)
        kill_at("sync", steps[-1])
        return found

    async def rolled(*args: Any) -> Any:
        found = await roll(*args)
        kill_at("rollout", steps[-1])
        return found

    def logged(self: Any, metrics: Any) -> None:
        log(self, metrics)
        kill_at("between", metrics.step)

    Workers.update_actor, RayPPOTrainer.generate_group, Tracker.log = updated, rolled, logged


def killed(command: list[str], phase: str, step: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and the variables with which ``python -m MODULE ...`` is killed at the
    moment."""
    at = command.index("-m") + 1
    return [*command[:at], "tests.faults.killing", *command[at:]], {VARIABLE: f"{phase}:{step}"}


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    patch_checkpoints()
    patch_trainer("ray" if "trainer.backend=ray" in sys.argv else "local")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
