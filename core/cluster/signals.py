"""Ctrl-C without losing work: the first one stops the run after its step, the second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the latter is a scheduler's warning
EXIT_STATUS = 130  # what shells report for a program ended by Ctrl-C
NOTICE = ": finishing this step, then saving a checkpoint and stopping. Once more stops at once."
NOTICE_AGAIN = " again: stopping at once; the last complete checkpoint stands"


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Send the signals to ``handler`` while entered. Python allows it in the main thread only."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def notify(number: int, *, again: bool) -> None:
    """Write what the signal does, by a call that is safe while it interrupts a print."""
    os.write(2, f"\n{signal.Signals(number).name}{NOTICE_AGAIN if again else NOTICE}\n".encode())


class GracefulStop:
    """Turns signals into ``requested``, which the loop reads at the end of a step.

    A second signal ends the process at once with status 130, without clean-up: the checkpoint layer expects no better.
    Outside the main thread only :meth:`request` does something.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pid = os.getpid()
        self._handlers = ExitStack()

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._handlers.enter_context(handling(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child inherits this handler: it must die of terminate(), and leave a Ctrl-C to its parent.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.requested:
            notify(number, again=True)
            os._exit(EXIT_STATUS)
        self.request()
        notify(number, again=False)

    def request(self) -> None:
        """Request a stop after the step, as a first signal does."""
        self.requested = True
