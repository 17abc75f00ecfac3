"""Waiting for Ray actors: every remote call has a deadline, and an actor that dies ends the wait at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from core.errors import WorkersLost, out_of_memory

log = logging.getLogger(__name__)

LOOK_S = 30.0  # how often a phase that goes on is mentioned
GRACE_S = 5.0  # for a death to be known after the error that it caused elsewhere, and for a tidy end


class Watch:
    """Waits for remote calls: at most ``timeout_s``, and only while all actors are alive."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.actors: dict[str, Any] = {}
        self.liveness: dict[ray.ObjectRef, str] = {}

    def add(self, name: str, actor: Any) -> None:
        self.actors[name] = actor
        self.liveness[actor.liveness.options(concurrency_group="aside").remote()] = name

    def call(self, phase: str, method: str, arguments: dict[str, tuple]) -> list[Any]:
        """Call the method of the actors with these names and wait for the results."""
        return self.wait(phase, {name: getattr(self.actors[name], method).remote(*a) for name, a in arguments.items()})

    def wait(self, phase: str, calls: dict[str, ray.ObjectRef]) -> list[Any]:
        """Return the results, in the order of ``calls`` (actor's name -> call).

        Raises WorkersLost where any actor died or the deadline passed, else what an actor raised.
        """
        start, results = time.monotonic(), dict.fromkeys(calls)
        pending = {ref: name for name, ref in calls.items()}
        while pending:
            passed = time.monotonic() - start
            if passed >= self.timeout_s:
                raise self.timeout(phase, pending.values())
            ready, _ = ray.wait([*pending, *self.liveness], timeout=min(self.timeout_s - passed, LOOK_S))
            if not ready:
                log.info("%s: waiting for %s, %.0f s", phase, ", ".join(pending.values()), time.monotonic() - start)
            for ref in ready:
                if ref in self.liveness:
                    raise self.lost(phase)
                name = pending.pop(ref)
                try:
                    results[name] = ray.get(ref)
                except RayError as error:
                    raise self.cause(phase, error, name) from error
        return list(results.values())

    def lost(self, phase: str, within_s: float = 0.0) -> WorkersLost | None:
        """Return what to raise if an actor died, or does within the time given."""
        dead, _ = ray.wait([*self.liveness], timeout=within_s)
        if not dead:
            return None
        try:
            told = ray.get(dead[0])
        except RayError as error:
            told = error
        return WorkersLost(f"{self.liveness[dead[0]]} died in phase {phase}: {' '.join(str(told).split())[:600]}")

    def cause(self, phase: str, error: RayError, name: str) -> BaseException:
        """Return the death behind an error, if there is one (ranks fail when one dies), else the actor's own.

        ``name`` is the actor that was called.
        """
        own = error.cause if isinstance(error, RayTaskError) else error
        if full := out_of_memory(own, phase, f"on {name}"):
            return full
        broken = isinstance(own, RuntimeError | RayError)  # what a broken connection raises
        return self.lost(phase, GRACE_S if broken else 0.0) or own

    def timeout(self, phase: str, names: Iterable[str]) -> WorkersLost:
        late = f"{', '.join(names)} did not finish phase {phase} within trainer.phase_timeout_s={self.timeout_s:g}"
        return WorkersLost(f"{late}; `py-spy dump --pid` shows what a process does")
