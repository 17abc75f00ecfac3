"""Harm to a run that is rehearsed: actors that kill themselves, or stop answering.

    python -m recipes.launch.strikes MODULE key=value ...     is what rehearse.py starts

The code of a run knows nothing of it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

JOURNAL = "RLREPRO_REHEARSAL"  # environment: the file of strikes; unset in an undisturbed run
PHASES = ("generate", "old_log_prob", "ref", "values")
PHASES += ("update_critic", "update_actor", "update_weights")
HANG = "hang"  # in the journal, behind the phases
HANG_S = 36_000


def kill_itself(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_itself(_: Any) -> None:
    time.sleep(HANG_S)


class Strikes:
    """At most one strike between two updates: a loss in each phase of the run, then a hang."""

    def __init__(self, journal: Path):
        self.journal = journal
        self.seen: set[str] = set()
        self.updates = 0
        self.struck_at = 1  # the first step is left alone, so that there is a checkpoint

    def before(self, phase: str, actors: dict[str, Any]) -> None:
        """Strike an actor as ``phase`` begins, if its turn has come."""
        if phase not in PHASES:
            return
        self.seen.add(phase)
        done = struck(self.journal)
        hangs = phase == "update_actor" and self.seen <= {*done} and HANG not in done
        kind = "engine" if phase == "generate" else "learner"
        names = [name for name in actors if name.startswith(kind)]
        if names and self.updates > self.struck_at and (hangs or phase not in done):
            with open(self.journal, "a") as journal:
                print(HANG if hangs else phase, file=journal)
            self.struck_at = self.updates
            actors[names[-1]].__ray_call__.remote(hang_itself if hangs else kill_itself)
        self.updates += phase == "update_actor"


def struck(journal: Path) -> list[str]:
    """Return the phases that were struck, and HANG behind them."""
    return journal.read_text().split() if journal.exists() else []


def run_disturbed(words: list[str]) -> None:
    """Run ``MODULE key=value ...`` and strike where the environment names a journal."""
    if journal := os.environ.get(JOURNAL):
        from core.cluster.ray_engine import RayEngine
        from core.cluster.ray_watch import Watch

        strikes = Strikes(Path(journal))
        wait, send = Watch.wait, RayEngine._send

        def struck_wait(self: Watch, phase: str, *arguments: Any, **options: Any) -> Any:
            strikes.before(phase, self.actors)
            return wait(self, phase, *arguments, **options)

        def struck_send(self: RayEngine, *arguments: Any) -> Any:
            strikes.before("generate", self.watch.actors)
            return send(self, *arguments)

        Watch.wait = struck_wait
        RayEngine._send = struck_send
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__")


if __name__ == "__main__":
    run_disturbed(sys.argv[1:])
