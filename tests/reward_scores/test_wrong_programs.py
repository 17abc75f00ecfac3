"""Programs that would rather have no score than a bad one: whatever they do, they are wrong, and in
time."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor

from core.config.composition import compose
from core.rewards.graders import GraderPool
from core.rewards.grading import Job, Scorers
from core.rewards.layer import scorer_options
from reward_scores import prime_code, unit_tests
from reward_scores.sandbox.sandbox import SandboxError
from reward_scores.score import ScoreStatus

WALL = 1.0  # seconds of an answer, far below the time limit of a test
SANDBOX = {"timeout_s": 20.0, "total_timeout_s": WALL, "memory_limit_mb": 256}
LONG = "x" * 400_000  # more than a pipe takes


def wrong(source, tests, scorer=unit_tests, **options):
    """Check that the answer is wrong, within the time that an answer has.

    On a busy machine a sandbox may take half of that time to start, which is an error: it is tried
    again.
    """
    for left in (2, 1, 0):
        begun = time.monotonic()
        try:
            score = scorer.score(f"```python\n{source}\n```", tests, sandbox=SANDBOX, **options)
            break
        except SandboxError:
            if not left:
                raise
    assert (score.value, score.acc, score.masked) == (0.0, 0.0, False), (source, score)
    assert score.status in (ScoreStatus.WRONG, ScoreStatus.PARSE_ERROR), (source, score)
    assert time.monotonic() - begun < WALL + 4, f"it held up its grader: {source}"


def all_wrong(sources, *tests):
    """Check the programs with each of the tests, three at a time: most of them wait."""
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda pair: wrong(*pair), itertools.product(sources, tests)))


SIGNAL = """
import fcntl, os, signal, socket
def to_first(number):
    for pid in (1, os.getppid()):
        for send in (lambda: os.kill(pid, number), lambda: signal.pidfd_send_signal(os.pidfd_open(pid), number)):
            try: send()
            except Exception: pass
        try:
            a, b = socket.socketpair()
            fcntl.fcntl(a, fcntl.F_SETOWN, pid)
            fcntl.fcntl(a, 10, number)
            fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | os.O_ASYNC)
            b.send(b'x')
        except Exception: pass
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGIO, signal.SIGUSR1, signal.SIGSTOP, signal.SIGKILL):
    to_first(number)
"""
POLL = "import time\nwhile True:\n    for _ in range(2000): pass\n    time.sleep(0.005)"
ANYWHERE = {  # as a script, when it is loaded, and in a call
    "signals to the first process": SIGNAL,
    "a loop that polls": POLL,
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "hard exit": "import os\nos._exit(0)",
    "no descriptors": "import os, time\nos.closerange(0, 64)\ntime.sleep(99)",
    "all memory": "x = []\nwhile True: x.append(bytearray(1 << 22))",
    "all threads": (
        "import threading, time\nwhile True:\n"
        "    try: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n    "
        "except RuntimeError: pass"
    ),
    "garbage to every descriptor": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'\\xff[[[\\n\\n{}\\n' * 9)\n    "
        "except OSError: pass"
    ),
    "a flood": (
        "import os\nwhile True:\n    for n in (1, 4):\n"
        "        try: os.write(n, b'x' * 65536)\n        except OSError: pass"
    ),
    "files": (
        "import os\nfor n in range(9**9):\n"
        "    try: os.makedirs('y' * 250); os.chdir('y' * 250)\n    except OSError: break"
    ),
}
CALLED = {  # values that are hard to carry, to read, or to compare
    "deep": "x = []\nfor _ in range(WHAT): x = [x]\nreturn x",
    "numbers beyond a float": "return 10 ** 400",
    "keys beyond a text": "return {10 ** 5000: 1}",
    "many objects": "return [[] for _ in range(10 ** 6)]",
    "broken characters": "return '\\ud800' * 9",
    "no number": "return float('nan')",
    "too long": "return 'x' * (1 << 25)",
}
DEPTHS = (198, 480, 989)
FN = {"fn_name": "f", "inputs": [json.dumps(LONG), "1"], "outputs": ["1.5", '{"1": 1}']}


def indented(source):
    return (
        "def f(x=None):\n"
        + "\n".join(f"    {line}" for line in source.split("\n"))
        + "\n    return 7"
    )


def test_a_wrong_program_is_over_before_its_graders_deadline():
    """What a grader's deadline ends has status timeout, which ``reward_model.on_error=mask`` takes
    out of the loss."""
    reward = compose(
        "grpo", ["reward_model.reward_manager=prime", "reward_model.timeout_s=2"]
    ).reward_model
    pool = GraderPool(Scorers(scorer_options(reward)), num_workers=1, timeout_s=reward.timeout_s)
    tests = {"inputs": ["1"] * 3, "outputs": ["1"] * 3}
    try:
        score = asyncio.run(pool.run(Job("apps", f"```python\n{POLL}\n```", tests, {})))
    finally:
        pool.close()
    assert (score.status, score.value) == (ScoreStatus.WRONG, 0.0), score


def test_a_script_that_evades_its_grader_is_wrong():
    all_wrong(ANYWHERE.values(), {"inputs": [LONG], "outputs": ["3"]})


def test_a_module_that_evades_its_grader_is_wrong():
    all_wrong(ANYWHERE.values(), FN)


def test_a_function_that_evades_its_grader_is_wrong():
    all_wrong(map(indented, ANYWHERE.values()), FN)


def test_a_value_that_cannot_be_graded_is_wrong():
    for source in CALLED.values():
        for depth in DEPTHS if "WHAT" in source else (0,):
            program = indented(source.replace("WHAT", str(depth)))
            wrong(program, FN)
            wrong(
                program,
                {"fn_name": "f", "inputs": ["1"], "outputs": ["1.5"]},
                prime_code,
                method="published",
            )


def test_a_text_that_the_parser_cannot_take_is_wrong():
    for source in (
        "x = " + "-" * 200_000 + "1",
        "[" * 100_000,
        "a" + ".b" * 100_000,
        "(" * 99 + "{" * 99,
    ):
        wrong(source, {"inputs": ["1\n"], "outputs": ["3"]}, prime_code, method="published")


def test_the_wall_is_the_harness_own(monkeypatch):
    from reward_scores.sandbox import sandbox

    monkeypatch.setattr(sandbox, "START_SECONDS", 30.0)
    with sandbox.Sandbox(sandbox.Limits(seconds=30), seconds=1.0) as box:
        begun = time.monotonic()
        assert box.run(POLL).status == "timeout" and 0.5 < time.monotonic() - begun < 3
        assert box.left <= 0
        assert box.run("print(1)").status == "timeout"  # nothing of its life is left
