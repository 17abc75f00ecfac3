"""A function in a process of its own, forked from the test's: nothing is imported anew."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class Forked:
    """A function that begins to run in a forked process. Its output comes through pipes."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        read_out, write_out = os.pipe()
        read_err, write_err = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=_call, args=(write_out, write_err, function, arguments)
        )
        self.process.start()
        self.pid = self.process.pid
        os.close(write_out)
        os.close(write_err)
        self.stdout = os.fdopen(read_out)
        self.stderr = os.fdopen(read_err)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> subprocess.CompletedProcess:
        """Wait for the end and return status and output, as far as it was not read before."""
        with self.stdout, self.stderr:
            out, err = self.stdout.read(), self.stderr.read()
        self.process.join()
        return subprocess.CompletedProcess((), self.process.exitcode, out, err)


def forked(function: Callable[..., Any], *arguments: Any) -> subprocess.CompletedProcess:
    """Run a function in a forked process to its end."""
    return Forked(function, *arguments).end()


def _call(out: int, err: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call the function with its output in the pipes instead of where pytest captures it."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    function(*arguments)
