"""Named moments at which a test may kill the process. Nothing happens unless a variable names one.

``RLREPRO_KILL_AT=update:3`` kills the process (SIGKILL, no clean-up of any kind) when it reaches
``kill_point("update", 3)``. The kill-and-resume tests use it to hit moments that are too short to be hit by chance.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "RLREPRO_KILL_AT"

# phase -> where its point stands
PHASES = {
    "rollout": "after the step's first group was scored",
    "update": "between two optimizer steps, or before the only one",
    "sync": "after the update, before the engine has the new weights",
    "between": "after the step's metrics were written, before the next step",
    "checkpoint_write": "all files written, no manifest yet",
    "checkpoint_rename": "manifest written, the folder still under its temporary name",
    "checkpoint_tracker": "the folder has its final name, the tracker file still names the previous one",
    "checkpoint_prune": "an old folder is renamed for deletion and not deleted yet",
    "remote_manifest": "the checkpoint is complete here; its files are at the run folder's URL, the manifest is not",
}


def kill_point(phase: str, step: int) -> None:
    """Kill this process if ``RLREPRO_KILL_AT`` is ``<phase>:<step>``.

    Raises:
        ValueError: the phase is not one of ``PHASES`` (checked on every call: a typing error shows in any test).
    """
    if phase not in PHASES:
        raise ValueError(f"kill_point({phase!r}): not one of {', '.join(PHASES)}")
    if os.environ.get(VARIABLE) == f"{phase}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)
