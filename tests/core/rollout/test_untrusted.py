"""Calls of untrusted code: whatever a function does costs its own call alone, within its
deadline."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from core.rollout.untrusted import UntrustedCalls

OVER = threading.Event()  # ends what the tests leave behind


@pytest.fixture(autouse=True)
def left_behind():
    OVER.clear()
    # What blocks the test itself ends too, and the test fails by its time
    too_long = threading.Timer(20, OVER.set)
    too_long.start()
    yield
    too_long.cancel()
    OVER.set()


def outcomes(*functions, seconds=2.0, calls=None):
    """Return what the calls gave, made at once, and the seconds that they took together."""
    calls = calls or UntrustedCalls()

    async def main():
        begun = time.monotonic()
        made = (calls.call(function, seconds) for function in functions)
        return await asyncio.gather(*made, return_exceptions=True), time.monotonic() - begun

    return asyncio.run(main())


def raising(error):
    def plain():
        raise error

    async def coroutine():
        raise error

    return plain, coroutine, lambda: coroutine()


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def swallows_its_cancellation():
    while not OVER.is_set():
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue


async def leaves_a_task_that_exits():
    asyncio.get_running_loop().create_task(raising(SystemExit(3))[1]())
    await asyncio.sleep(0.01)
    return "answer"


async def blocks():
    OVER.wait(30)


async def waits_in_a_thread():
    await asyncio.to_thread(OVER.wait, 30)


async def answers():
    await asyncio.sleep(0)
    return "answer"


ENDINGS = (
    SystemExit(0),
    KeyboardInterrupt(),
    asyncio.CancelledError("x"),
    StopIteration("x"),
    GeneratorExit("x"),
    BaseException("x"),
)


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
def test_what_would_end_the_run_is_an_error_of_the_call_that_names_it(error):
    found, seconds = outcomes(*raising(error), answers)
    assert found[-1] == "answer" and seconds < 2
    for failure in found[:-1]:
        assert isinstance(failure, RuntimeError) and type(error).__name__ in str(failure)


def test_errors_and_values_of_any_kind_of_function_arrive():
    timeout = TimeoutError("of its own")
    found, _ = outcomes(*raising(timeout), lambda: 7, answers, lambda: answers())
    assert found[:3] == [timeout] * 3 and found[3:] == [7, "answer", "answer"]
    (cancelled, exits), _ = outcomes(cancels_itself, leaves_a_task_that_exits)
    assert "CancelledError" in str(cancelled) and exits == "answer"


@pytest.mark.parametrize(
    "hangs",
    [blocks, lambda: OVER.wait(30), lambda: blocks(), swallows_its_cancellation, waits_in_a_thread],
    ids=["blocks", "plain", "decorated", "swallows", "thread"],
)
def test_of_sixty_four_calls_at_once_those_that_hang_cost_their_deadline_and_no_other(hangs):
    calls = UntrustedCalls()
    for _ in range(2):  # what was left behind holds up no later call
        found, seconds = outcomes(*(hangs, answers) * 32, seconds=3.0, calls=calls)
        assert found[1::2] == ["answer"] * 32
        assert all(isinstance(failure, TimeoutError) for failure in found[::2])
        assert all("no answer in 3 s" in str(failure) for failure in found[::2])
        assert seconds < 4.5


def test_a_call_that_a_blocked_loop_held_up_learns_the_cause_and_the_loop_is_used_again():
    calls, loops = UntrustedCalls(), []

    async def where():
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.01)

    outcomes(where, where, calls=calls)
    (held, blocked), _ = outcomes(where, blocks, seconds=0.4, calls=calls)
    for failure in (held, blocked):
        assert isinstance(failure, TimeoutError) and "blocks the event loop" in str(failure)
    outcomes(where, calls=calls)
    OVER.set()
    time.sleep(0.2)
    outcomes(where, calls=calls)
    assert loops[0] is loops[1] is loops[2] is loops[4] is not loops[3]


def test_whoever_stops_waiting_does_so_at_once():
    async def main():
        task = asyncio.create_task(UntrustedCalls().call(swallows_its_cancellation, 60))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        task.cancel()
        await asyncio.wait({task})
        return time.monotonic() - begun

    assert asyncio.run(main()) < 1


def test_a_process_ends_while_calls_hang(tmp_path):
    import subprocess

    program = """
import asyncio, time
from core.rollout.untrusted import UntrustedCalls
async def main():
    calls = UntrustedCalls()
    async def hangs(): await asyncio.to_thread(time.sleep, 60)
    async def blocks(): time.sleep(60)
    for function in (hangs, blocks, lambda: time.sleep(60)):
        try: await calls.call(function, 0.1)
        except TimeoutError: print("timeout")
asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    assert (ran.stdout, ran.returncode) == ("timeout\n" * 3, 0), ran.stderr
