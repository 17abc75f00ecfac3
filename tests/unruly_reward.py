"""A reward function that misbehaves on request: only ever called in a pool's workers, under a
memory limit.

An answer ``unruly:<name>`` calls the function of that name; any other is right if it equals the
ground truth.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time


def sleep():
    time.sleep(3600)


def power():
    return 9**9**9**9  # in C: no signal's handler runs meanwhile


def deaf():
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def segfault():
    ctypes.string_at(0)


def allocate_at_once():
    return "x" * 10**11


def leave_at_once():
    os._exit(0)


def babble():
    os.write(4, b"= no message\n" * 100)  # the pipe to the driver
    time.sleep(3600)


def fork():
    """Both sides come back from the scorer, the child first and with an error."""
    if os.fork() == 0:
        raise ValueError("the child's")
    time.sleep(0.1)


def start_and_hang():
    if os.fork() == 0:
        time.sleep(3600)
    time.sleep(3600)


FUNCTIONS = {
    **dict.fromkeys((sleep, power, deaf, start_and_hang), "timeout"),
    **dict.fromkeys((segfault, allocate_at_once, leave_at_once, babble), "crash"),
    fork: "ok",
}
EXPECTED = {function.__name__: status for function, status in FUNCTIONS.items()}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    kind, separator, name = solution_str.partition("unruly:")
    if not separator:
        return float(solution_str == ground_truth)
    next(function for function in FUNCTIONS if function.__name__ == name)()
    return 1.0
