"""Shell commands that a person may interrupt: the one that runs hears of it, and is waited for.

A training run that is interrupted saves a checkpoint first, which takes longer than a shell would wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import ExitStack, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler's warning, a terminal that closes
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


class Commands:
    """Runs commands one after another, while entered. Each signal goes to the running one as SIGINT.

    A command has a session of its own, so that a Ctrl-C reaches it once and by this way only. Where none runs, a signal
    raises KeyboardInterrupt. Outside the main thread signals are left as they are.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._busy = False
        self._child: subprocess.Popen | None = None
        self._handlers = ExitStack()

    def __enter__(self) -> Commands:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._handlers.callback(signal.signal, number, signal.signal(number, self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def run(self, command: str) -> int:
        """Run a command to its end and return its exit status, INTERRUPTED where a signal came."""
        self._busy = True
        try:
            self._child = start(command)
            if self.interrupted:  # while it was being started
                signal_group(self._child, signal.SIGINT)
            status = self._child.wait()
        finally:
            self._child, self._busy = None, False
        return INTERRUPTED if self.interrupted else status

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.interrupted = True
        if not self._busy:
            raise KeyboardInterrupt
        if self._child is not None:
            signal_group(self._child, signal.SIGINT)


def start(command: str, **streams: object) -> subprocess.Popen:
    """Start a shell command in a session of its own: a process group that :func:`signal_group` reaches whole."""
    return subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True, **streams)


def signal_group(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a command and to everything that it started and that kept its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
