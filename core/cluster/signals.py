"""What ends a run early: Ctrl-C, without losing work, and the loss of a process.

The first Ctrl-C asks the loop to stop after its step, the second one stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_STATUS = 130  # what shells report for a program ended by Ctrl-C
NOTICE = ": finishing this step, then saving a checkpoint and stopping. Once more stops at once."


class GracefulStop:
    """Turns SIGINT and SIGTERM (a scheduler's warning) into ``requested``, which the loop reads at the end of a step.

    A second signal ends the process at once with status 130, without clean-up: the checkpoint layer expects no better.
    Outside the main thread, where Python allows no handlers, only :meth:`request` does something.

    Example::

        with GracefulStop() as stop:
            for step in steps:
                train(step)
                if stop.requested:
                    save(step)
                    break
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}
        self._pid = os.getpid()

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._in_forked_child(number)
            return
        name = signal.Signals(number).name
        if self.requested:
            _say(f"\n{name} again: stopping at once; the last complete checkpoint stands\n")
            os._exit(EXIT_STATUS)
        self.request()
        _say(f"\n{name}{NOTICE}\n")

    def request(self) -> None:
        """Asks the loop to stop after its step, as a first signal does."""
        self.requested = True

    def _in_forked_child(self, number: int) -> None:
        """A worker inherits this handler: it must die of ``terminate()``, and leave a Ctrl-C to the driver."""
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _say(text: str) -> None:
    os.write(2, text.encode())  # print is not safe in a signal handler: it may interrupt another print
