"""A function in a process of its own, forked from the test's: nothing is imported anew."""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        with self.stdout, self.stderr, ThreadPoolExecutor(1) as reader:
            err = reader.submit(self.stderr.read)  # at the same time: a full pipe would block it
            out = self.stdout.read()
        self.process.join()
        return subprocess.CompletedProcess((), self.process.exitcode, out, err.result())


def forked(function: Callable[..., Any], *arguments: Any) -> subprocess.CompletedProcess:
    """Run a function in a forked process to its end."""
    return Forked(function, *arguments).end()


def forked_command(command: list[str]) -> subprocess.CompletedProcess:
    """Run ``[python, "-m", MODULE, *WORDS]`` in a forked process to its end."""
    return forked(run_module, command)


def run_module(command: list[str]) -> None:
    """Run what follows ``python -m`` in this process."""
    module, *words = command[2:]
    sys.argv = [module, *words]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _call(out: int, err: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call the function with output and log in the pipes instead of where pytest captures them."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers.clear()
    function(*arguments)
