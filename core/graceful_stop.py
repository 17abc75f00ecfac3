"""Turn signals into a request to stop, which the loop reads while it collects and after a step."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

# Ctrl-C; a scheduler's end of a job, and its warning before
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A scheduler's signal that comes again within these seconds is the same one: srun and shells pass
# signals on
SAME_S = 10.0
ENDED_BY_SIGNAL = 128  # plus its number: what shells report for a program that a signal ended
FIRST = (
    ": finishing this step, then saving a checkpoint; the same command continues from it. "
    "Once more stops at once."
)
AGAIN = (
    " again: stopping at once; the last complete checkpoint stands, "
    "and the same command continues from it"
)


class GracefulStop:
    """Sets ``requested`` at the first signal.

    The same signal within ``SAME_S`` counts once, Ctrl-C excepted. A second signal ends the process
    at once with status 128 plus its number, without clean-up: the checkpoint layer expects no
    better. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self.cause = ""  # the signal's name
        self._last_signal_at = 0.0
        self._pid = os.getpid()
        self._handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._handlers_before = {
                number: signal.signal(number, self._handle) for number in SIGNALS
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def request(self, cause: str) -> None:
        """Stop as after a signal of this name."""
        self.requested, self.cause = True, cause

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child inherits this handler: terminate() must end it, Ctrl-C is its parent's
            if number == signal.SIGTERM:
                os._exit(ENDED_BY_SIGNAL + number)
            return
        name = signal.Signals(number).name
        now = time.monotonic()
        came_again = self.requested and name == self.cause and now - self._last_signal_at < SAME_S
        if came_again and number != signal.SIGINT:
            return
        is_second = self.requested
        self.requested = True
        self.cause = name
        self._last_signal_at = now
        with suppress(OSError):  # nobody may read it any more
            # os.write is safe while the signal interrupts a print
            os.write(2, f"\n{name}{AGAIN if is_second else FIRST}\n".encode())
        if is_second:
            os._exit(ENDED_BY_SIGNAL + number)
