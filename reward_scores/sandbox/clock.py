"""Measure how long untrusted code takes: processor time while it computes, time on the wall while it waits.

Limits of memory, files and processes are ``confine.py``.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Sequence

OWNER = 0  # the descriptor that hangs up when nobody waits for an answer any more
_SLICE = 0.05  # seconds between looks at the clock
_WINDOW = 0.5  # seconds over which processor time is looked at
_IDLE = 0.002  # seconds of processor time in a window that do not count as work
PATIENCE = 5  # times its limit that a program may last on the wall, at most, for want of a processor


class Clock:
    """The time that processes are charged for: neither a fast nor a busy machine changes a score much.

    While they use no processor, that is time on the wall; while they do, it is the processor's time, since they may
    have to share it, but no less than a share of the wall's. A wait of this process that took much longer than asked
    for, so that the machine was held up, counts as a short one.

    Whatever they do, their time is over at ``end`` (of :func:`time.monotonic`): an answer's grader has a deadline too,
    beyond which nothing would be known about the answer.
    """

    def __init__(self, seconds: float, pids: Sequence[int], end: float = math.inf):
        self.seconds = self.left = seconds
        self.pids, self.end = pids, end
        self.last, self.busy, self.window = time.monotonic(), self._processor_time(), 0.0

    def charge(self) -> float:
        """Charge the time since the last call, and return the seconds left."""
        now = time.monotonic()
        passed, self.last = min(now - self.last, 2 * _SLICE), now
        self.left -= passed
        self.window += passed
        if self.window >= _WINDOW or self.left <= 0:
            self._settle()
        if now >= self.end:
            self.left = 0.0
        return self.left

    def _settle(self) -> None:
        busy = self._processor_time()
        used, self.busy = busy - self.busy, busy
        if used > _IDLE:
            self.left += max(0.0, self.window - max(used, self.window / PATIENCE))
        self.window = 0.0

    def _processor_time(self) -> float:
        return sum(map(_processor_time, self.pids))

    def used(self) -> float:
        return self.seconds - self.left

    def poll(self, poll: select.poll) -> list[int]:
        """Return the ready descriptors; none once the time is over. Ends the process when its owner has gone."""
        while self.charge() > 0:
            ready = [
                number for number, _ in poll.poll(1000 * min(_SLICE, self.left, max(0.0, self.end - time.monotonic())))
            ]
            if OWNER in ready:
                os._exit(0)
            if ready:
                return ready
        return []


def _processor_time(pid: int) -> float:
    """Return a process's seconds of processor time, from a clock number made as in the kernel's headers."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it has ended
        return 0.0
