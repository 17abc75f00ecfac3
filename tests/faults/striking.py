"""A trainer over Ray that kills one of its run's processes in the middle of a phase, and keeps a
journal of its steps.

``python -m tests.faults.striking key=value ...`` runs PPO. The variable says which kind of process
dies, in which phase of which step (once each, restarts included), and where the journal is: one
JSON line for every beginning, strike and complete step, on disk before the strike.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray

from core import command_line
from core.ray_trainer import RayPPOTrainer
from core.types import StepMetrics, Trajectory
from reward_scores.score import Score

VARIABLE = "RLREPRO_STRIKES"  # JSON: kind, at {phase: step}, journal
KINDS = ("learner", "engine", "grader")
# phase -> what the driver waits for in it
REMOTE = {
    "log-probs": "old_log_prob",
    "update": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
}
PHASES = ("rollout", *REMOTE, "validation")


class Striking(RayPPOTrainer):
    def init_workers(self) -> Striking:
        orders = json.loads(os.environ[VARIABLE])
        self.kind, self.at, self.journal = orders["kind"], orders["at"], Path(orders["journal"])
        self.validating, self.completing = False, 0
        # Of this object: a class that overrides the hook plays episodes
        self.generate = self.struck_generate
        super().init_workers()
        self.pids = {name: _pid(actor) for name, actor in self.workers.watch.actors.items()}
        self.note("begun", step=self.run.step)
        wait = self.workers.watch.wait

        def struck(phase: str, calls: dict[str, Any], **options: Any) -> list[Any]:
            for name, remote in REMOTE.items():
                if phase == remote:
                    self.strike(name)
            return wait(phase, calls, **options)

        self.workers.watch.wait = struck
        self.reward.score = partial(self.struck_score, self.reward.score)
        return self

    # -- the moments

    async def struck_generate(self, *args: Any) -> Trajectory:
        sample = asyncio.ensure_future(super().generate(*args))
        if self.kind != "grader":
            await asyncio.sleep(0)  # once for the request to be made, once for it to be sent
            await asyncio.sleep(0)
            self.strike("validation" if self.validating else "rollout")
        return await sample

    async def struck_score(self, score: Callable[..., Any], *args: Any) -> Score:
        """Score an answer, and strike a scoring process while it has work: the reward function
        takes its time."""
        work = asyncio.ensure_future(score(*args))
        if self.kind == "grader":
            while not work.done() and not self.scoring():
                await asyncio.sleep(0.001)
            self.strike("validation" if self.validating else "rollout")
        return await work

    async def answer_val_prompts(self) -> list[Any]:
        self.validating = True
        try:
            return await super().answer_val_prompts()
        finally:
            self.validating = False

    def complete_step(self, groups_P: Any, batch: Any, metrics: StepMetrics) -> None:
        ordinals = [group.prompt.ordinal for group in groups_P]
        # Validation comes before the session counts the step as complete
        self.completing = metrics.step
        super().complete_step(groups_P, batch, metrics)
        self.note("step", step=self.run.step, ordinals=ordinals)

    # -- the act

    def strike(self, phase: str) -> None:
        of = {"validation": self.completing, "checkpoint": self.run.step}
        step = of.get(phase, self.run.step + 1)
        if self.at.get(phase) != step:
            return
        victim = self.victim()
        try:
            self.journal.with_name(f"{self.journal.name}.{phase}").touch(exist_ok=False)
        except FileExistsError:  # it is done, and this is the step again
            return
        self.note("strike", step=step, phase=phase)
        os.kill(victim, signal.SIGKILL)

    def victim(self) -> int:
        if self.kind == "grader":
            return self.graders()[-1]
        return [pid for name, pid in self.pids.items() if name.startswith(self.kind)][-1]

    def scoring(self) -> bool:
        pool = self.reward.pool
        return pool._idle.qsize() < len(pool.graders) and bool(self.graders())

    def graders(self) -> list[int]:
        """Return the graders' processes."""
        return [one.process.pid for one in self.reward.pool.graders if one.process is not None]

    def note(self, what: str, **details: Any) -> None:
        with open(self.journal, "a") as file:
            file.write(json.dumps({"what": what, "time": time.time(), **details}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _pid(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


if __name__ == "__main__":
    command_line.main("ppo", trainer="tests.faults.striking:Striking")
