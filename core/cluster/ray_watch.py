"""Waiting for Ray actors: every remote call has a deadline, and an actor that dies or hangs ends the wait."""

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
GRACE_S = 5.0  # for a death to be known after the error that it caused elsewhere, for stacks, for a tidy end
ASIDE = {"concurrency_group": "aside"}  # threads of an actor that answer while it is at work


class Watch:
    """Waits for remote calls, with a deadline and an eye on every actor.

    An actor that dies ends a wait at once, one that works on without an end at the deadline, and one that gives no
    sign of life (its process is stopped, or the machine hangs) after ``silence_s``.
    """

    def __init__(self, timeout_s: float, silence_s: float = 300.0):
        self.timeout_s, self.silence_s = timeout_s, silence_s
        self.look_s = min(LOOK_S, silence_s / 4)
        self.actors: dict[str, Any] = {}
        self.liveness: dict[ray.ObjectRef, str] = {}
        self.beats: dict[str, tuple[ray.ObjectRef, float]] = {}  # the last one requested, and when

    def add(self, name: str, actor: Any) -> None:
        self.actors[name] = actor
        self.liveness[actor.liveness.options(**ASIDE).remote()] = name

    def call(self, phase: str, method: str, arguments: dict[str, tuple]) -> list[Any]:
        """Call the method of the actors with these names and wait for the results."""
        return self.wait(phase, {name: getattr(self.actors[name], method).remote(*a) for name, a in arguments.items()})

    def wait(self, phase: str, calls: dict[str, ray.ObjectRef], *, alone: bool = False) -> list[Any]:
        """Return the results, in the order of ``calls`` (actor's name -> call).

        Raises WorkersLost where an actor died or the deadline passed, else what an actor raised. ``alone``: only of the
        actors that were called does a death matter.
        """
        start, results = time.monotonic(), dict.fromkeys(calls)
        pending = {ref: name for name, ref in calls.items()}
        liveness = [ref for ref, name in self.liveness.items() if name in calls or not alone]
        while pending:
            left = self.timeout_s - (time.monotonic() - start)
            if left <= 0:
                raise self.timeout(phase, pending.values())
            ready, _ = ray.wait([*pending, *liveness], timeout=min(left, self.look_s))
            if not ready:
                log.info("%s: waiting for %s, %.0f s", phase, ", ".join(pending.values()), time.monotonic() - start)
                if error := self.silence(phase, pending.values()):
                    raise error
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
        return WorkersLost(f"{self.liveness[dead[0]]} died in phase {phase}: {' '.join(_text(dead[0]).split())[:600]}")

    def cause(self, phase: str, error: RayError, name: str) -> BaseException:
        """Return the death behind an error, if there is one (ranks fail when one dies), else the actor's own.

        ``name`` is the actor that was called.
        """
        own = error.cause if isinstance(error, RayTaskError) else error
        if full := out_of_memory(own, phase, f"on {name}"):
            return full
        broken = isinstance(own, RuntimeError | RayError)  # what a broken connection raises
        return self.lost(phase, GRACE_S if broken else 0.0) or own

    def silence(self, phase: str, names: Iterable[str]) -> WorkersLost | None:
        """Request a sign of life of each actor; return what to raise where one is overdue."""
        now, silent = time.monotonic(), []
        for name in names:
            beat, requested = self.beats.get(name, (None, now))
            if beat is None or ray.wait([beat], timeout=0)[0]:
                self.beats[name] = self.actors[name].beat.options(**ASIDE).remote(), now
            elif now - requested > self.silence_s:
                silent.append(name)
        why = f"gave no sign of life in phase {phase} for trainer.heartbeat_timeout_s={self.silence_s:g}"
        return self.with_stacks(why, silent) if silent else None

    def timeout(self, phase: str, names: Iterable[str]) -> WorkersLost:
        return self.with_stacks(
            f"did not finish phase {phase} within trainer.phase_timeout_s={self.timeout_s:g}", names
        )

    def with_stacks(self, why: str, names: Iterable[str]) -> WorkersLost:
        stacks = {name: self.actors[name].stacks.options(**ASIDE).remote() for name in names}
        ready, _ = ray.wait(list(stacks.values()), num_returns=len(stacks), timeout=GRACE_S)
        shown = [f"{name}:\n{_text(ref) if ref in ready else 'does not answer'}" for name, ref in stacks.items()]
        return WorkersLost(f"{', '.join(stacks)} {why}; Python stacks:\n" + "\n".join(shown))


def _text(ref: ray.ObjectRef) -> str:
    """Return what a call gave, or its error, as text."""
    try:
        return ray.get(ref)
    except RayError as error:
        return str(error)
