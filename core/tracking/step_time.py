"""The seconds of a step: a clock for activities that overlap, and the parts that add up to a step's whole time.

Imports no torch, since reports use it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

# part -> the timers it is made of. With the rest they add up to timing_s/whole, the seconds since the line before.
PARTS: Mapping[str, tuple[str, ...]] = {
    "decode": ("decode",),
    "score": ("reward",),
    "log-probs": ("old_log_prob",),
    "reference": ("ref",),
    "values": ("values",),
    "advantages": ("adv",),
    "update": ("update_critic", "update_actor"),
    "sync": ("update_weights",),
    "next step's samples": ("wait_ahead",),
    "validation": ("testing",),
    "checkpoint": ("save_checkpoint",),
}
REST = "other"
PREFIX = "timing_s/"


class BusyClock:
    """Wall time by activity, each second counted once: for the first activity of ``order`` that is going on.

    Samples decode while others are scored; what is scored behind decoding costs nothing, and only the seconds in
    which nothing decodes are the scorer's. Used from one thread at a time.
    """

    def __init__(self, *order: str, now: Callable[[], float] = time.perf_counter):
        self.order, self.now = order, now
        self.going_on = dict.fromkeys(order, 0)
        self.seconds = dict.fromkeys(order, 0.0)
        self.since = now()

    @contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Count one more of this activity while the block runs. Blocks may overlap."""
        self._charge()
        self.going_on[activity] += 1
        try:
            yield
        finally:
            self._charge()
            self.going_on[activity] -= 1

    def _charge(self) -> None:
        now = self.now()
        first = next((name for name in self.order if self.going_on[name]), None)
        if first is not None:
            self.seconds[first] += now - self.since
        self.since = now

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by activity."""
        self._charge()
        taken, self.seconds = self.seconds, dict.fromkeys(self.order, 0.0)
        return taken


def parts(row: Mapping[str, float]) -> dict[str, float]:
    """Return a step's seconds by part, in the order of :data:`PARTS` with the rest last; they sum to the whole.

    A part that never began is left out; a line without ``timing_s/whole`` (the validation before the first step) has
    none.
    """
    if (whole := row.get(f"{PREFIX}whole")) is None:
        return {}
    seconds = {
        name: sum(row.get(PREFIX + timer, 0.0) for timer in timers)
        for name, timers in PARTS.items()
        if any(PREFIX + timer in row for timer in timers)
    }
    return {**seconds, REST: whole - sum(seconds.values())}
