"""Call code that is not ours (tools, simulated users) off the run's event loop, within a deadline.

A plain function has a thread of its own. The coroutines of one object share an event loop in a
thread, because what they use together (sessions, semaphores) belongs to one loop. A coroutine that
blocks this loop costs its own call: calls that could not begin in half of their deadline, and later
ones for as long as the loop is blocked, have loops of their own.

Nothing can stop a thread. What misses its deadline is cancelled and left behind, and its outcome is
dropped. Scorers run in processes that can be killed instead: ``core/rewards/graders.py``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

BLOCKED = (
    ": a coroutine blocks the event loop that all of them share; "
    "make a method that blocks a plain def, which has a thread of its own"
)


class UntrustedCalls:
    """The calls of one object's methods, from the run's event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # of the coroutines
        self._blocked = False
        self._lock = threading.Lock()

    async def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """Return what the function returns, or the coroutine that it returns.

        Raises TimeoutError after ``seconds``, and what the function raises: RuntimeError in place
        of what would end more than this call (SystemExit, CancelledError, StopIteration and such).
        """
        call = self.begin(function)
        reached = threading.Event()
        try:
            if not await call.settled(seconds / 2):
                self._test_loop(call, reached)
                if not await call.settled(seconds / 2):
                    held = call.queued and not reached.is_set()
                    self._blocked = self._blocked or held
                    raise TimeoutError(f"no answer in {seconds:g} s{BLOCKED if held else ''}")
        finally:
            call.abandon()
        return call.result()

    def begin(self, function: Callable[[], Any], *, alone: bool = False) -> Call:
        """Begin a call, for which nobody need wait. ``alone``: on an event loop of its own."""
        call = Call(function)
        if alone:
            _start_thread(call.run_alone)
        elif inspect.iscoroutinefunction(function):
            self._queue(call)
        else:
            _start_thread(self._run_plain, call)
        return call

    def close(self) -> None:
        """Stop the event loop, unless a coroutine blocks it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _run_plain(self, call: Call) -> None:
        try:
            result = call.function()
            if not inspect.isawaitable(result):
                call.settle(result)
            elif not call.answer.done():  # a coroutine behind a plain decorator
                call.function = lambda: result
                self._queue(call)
        except BaseException as error:
            call.settle(error=error)

    def _queue(self, call: Call) -> None:
        """Have the event loop run a coroutine."""
        if self._blocked:
            _start_thread(call.run_alone)
            return
        with self._lock:
            if self._loop is None:
                self._loop = _new_loop()
                _start_thread(_serve, self._loop)
            call.queued = True
            self._loop.call_soon_threadsafe(call.run_shared, self._loop)

    def _test_loop(self, call: Call, reached: threading.Event) -> None:
        """Run a coroutine that could not begin elsewhere. Set ``reached`` if the event loop
        turns."""
        if not call.queued:
            return

        def turn() -> None:
            reached.set()
            self._blocked = False

        self._loop.call_soon_threadsafe(turn)
        if not call.began:
            call.queued = False
            self._blocked = True
            _start_thread(call.run_alone)


class Call:
    """A call that began. Its coroutine runs where it is claimed first."""

    def __init__(self, function: Callable[[], Any]):
        self.function = function
        self.home = asyncio.get_running_loop()
        # Value and error: a future refuses StopIteration, and CancelledError would cancel who waits
        self.answer: asyncio.Future[tuple[Any, BaseException | None]] = self.home.create_future()
        self.queued = False  # on the event loop of all coroutines
        self._claimed = threading.Lock()
        self._task: asyncio.Task | None = None

    async def settled(self, seconds: float) -> bool:
        """Wait for the answer. Return whether it came."""
        done, _ = await asyncio.wait({self.answer}, timeout=seconds)
        return bool(done)

    def result(self) -> Any:
        """Return the answer, which has come, or raise what the function raised."""
        value, error = self.answer.result()
        if error is None:
            return value
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the answer, from any thread. Where nobody waits any more it is dropped."""

        def set_answer() -> None:
            if not self.answer.done():
                self.answer.set_result((value, error))

        with suppress(RuntimeError):  # the run's event loop is closed
            self.home.call_soon_threadsafe(set_answer)

    @property
    def began(self) -> bool:
        return self._claimed.locked()

    def claim(self) -> bool:
        """Return whether the coroutine is the caller's to run: at most one claim is granted."""
        return self._claimed.acquire(blocking=False)

    def run_shared(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the coroutine on the event loop of this thread, unless it runs elsewhere by then."""
        self._task = loop.create_task(self._run())

    def run_alone(self) -> None:
        """Run the coroutine on an event loop of its own."""
        try:
            loop = _new_loop()
        except OSError as error:  # too many open files
            self.settle(error=error)
            return
        self._task = loop.create_task(self._run())
        loop.run_until_complete(self._task)
        loop.close()

    async def _run(self) -> None:
        if not self.claim():
            return
        try:
            self.settle(await self.function())
        except BaseException as error:
            self.settle(error=error)

    def abandon(self) -> None:
        """Cancel what has not ended. A coroutine that did not begin never does."""
        self.claim()
        self.answer.cancel()
        if self._task is not None:
            with suppress(RuntimeError):  # its loop is closed
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class DaemonThreads(ThreadPoolExecutor):
    """The executor of ``asyncio.to_thread``: a thread a call. No call waits for another, no exit
    for a call."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()

        def work() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        _start_thread(work)
        return future


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads(1))
    return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped."""
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
            break
        except BaseException:  # of a task that a coroutine began, and left behind
            log.warning("a task of a tool or a simulated user failed", exc_info=True)
    loop.close()


def _start_thread(function: Callable[..., Any], *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()
