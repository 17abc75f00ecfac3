"""A reward function that is dangerous on request: only ever called in the pool's workers, under a memory limit.

An answer ``bomb:<name>`` does what the table below says; any other is right if it equals the ground truth.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time

# What the pool has to say of the answer; what dies slowly may be too slow on a busy machine
HANGS, DIES, DIES_SLOWLY, SURVIVES = "timeout", "crash", "crash or timeout", "ok"


def power():
    return 9**9**9**9


def regex():
    return re.match(r"(a+)+$", "a" * 64 + "b")


def sleep():
    time.sleep(3600)


def deaf():
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def nested():
    """10^6 nested braces in a parser that recurses, with Python's own guard off."""
    sys.setrecursionlimit(10**8)

    def parse(text, at):
        return parse(text, at + 1) if text[at] == "{" else at

    parse("{" * 10**6 + "}" * 10**6, 0)
    ctypes.string_at(0)  # where the interpreter's stack held


def segfault():
    ctypes.string_at(0)


def allocate():
    hoard = []
    while True:
        hoard.append(bytearray(10**7))


def allocate_at_once():
    return "x" * 10**11


def leave():
    sys.exit(0)


def leave_at_once():
    os._exit(0)


def suicide():
    os.kill(os.getpid(), signal.SIGKILL)


def close_everything():
    os.closerange(0, 1000)


def babble():
    os.write(4, b"= no message\n" * 100)
    time.sleep(3600)


def impostor():
    """A right verdict in the wrong form, written past the worker."""
    os.write(4, b'=[{"value": NaN, "parts": {}, "status": "ok", "masked": false, "pred": null}]\n')
    time.sleep(3600)


def huge_result():
    raise ValueError("x" * 10**7)


def fork():
    """Both sides come back from the scorer, the child first and with an error."""
    if os.fork() == 0:
        raise ValueError("the child's")
    time.sleep(0.1)


def forks():
    """A few generations, all of which stay."""
    worker = os.getpid()
    for _ in range(4):
        os.fork()
    if os.getpid() != worker:
        time.sleep(3600)


def daemon():
    """A process that has left session, group and parent."""
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    os.waitpid(between, 0)


def daemon_and_segfault():
    daemon()
    ctypes.string_at(0)


def daemon_and_hang():
    daemon()
    time.sleep(3600)


def thread():
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


def alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)


BOMBS = {
    **dict.fromkeys((power, regex, sleep, deaf, stopped, daemon_and_hang), HANGS),
    **dict.fromkeys((segfault, allocate_at_once, leave, leave_at_once, suicide), DIES),
    **dict.fromkeys((close_everything, babble, impostor, daemon_and_segfault), DIES),
    **dict.fromkeys((nested, allocate, huge_result), DIES_SLOWLY),
    **dict.fromkeys((fork, forks, daemon, thread, alarm), SURVIVES),
}
EXPECTED = {bomb.__name__: status for bomb, status in BOMBS.items()}
BY_NAME = {bomb.__name__: bomb for bomb in BOMBS}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    kind, separator, name = solution_str.partition("bomb:")
    if not separator:
        return float(solution_str == ground_truth)
    BY_NAME[name]()
    return 1.0
