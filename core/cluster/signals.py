"""Ctrl-C, a closed terminal and a scheduler's warning without losing work.

The first signal stops the run after its step, the second one at once.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

# Ctrl-C; a scheduler's warning; a terminal that closes; the warning that `sbatch --signal=USR1@600` asks SLURM for
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ENDED_BY_SIGNAL = 128  # plus its number: what shells report for a program that a signal ended
NOTICE = (
    ": finishing this step, then saving a checkpoint and stopping; the same command continues from it. "
    "Once more stops at once."
)
NOTICE_AGAIN = " again: stopping at once; the last complete checkpoint stands, and the same command continues from it"


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], None], numbers: Collection[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Send the signals to ``handler`` while entered. Python allows it in the main thread only.

    A SIGHUP that is ignored stays so: ``nohup`` asks for it.
    """
    handled = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def notify(number: int, *, again: bool) -> None:
    """Write what the signal does, by a call that is safe while it interrupts a print."""
    text = f"\n{signal.Signals(number).name}{NOTICE_AGAIN if again else NOTICE}\n"
    with suppress(OSError):  # the terminal that closed, say: nobody reads it
        os.write(2, text.encode())


def drop_closed_terminal() -> None:
    """Send what is still printed nowhere if it went to the terminal that has closed: a print must not end the run."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Block for the processes that are started while entered what a terminal or a scheduler sends to all of a group.

    The step that is finished still needs them. A mask is inherited, a handler is not.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class GracefulStop:
    """Turns signals into ``requested``, which the loop reads at the end of a step.

    A second signal ends the process at once with status 128 plus its number, without clean-up: the checkpoint layer
    expects no better. Outside the main thread only :meth:`request` does something.
    """

    def __init__(self) -> None:
        self.requested = False
        self.cause = ""  # the signal's name, where it was one
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
        if number == signal.SIGHUP:
            drop_closed_terminal()
        if self.requested:
            notify(number, again=True)
            os._exit(ENDED_BY_SIGNAL + number)
        self.cause = signal.Signals(number).name
        self.request()
        notify(number, again=False)

    def request(self) -> None:
        """Request a stop after the step, as a first signal does."""
        self.requested = True
