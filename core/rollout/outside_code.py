"""Calls of tools and simulated users: code that may raise, return or block what it likes, and never ends a run.

Whatever a call comes to is a value: what it returned, or :class:`Failed` with the reason. Code that may block runs on
an event loop of its own, so that a deadline holds for it too; what Python cannot interrupt, a C function that keeps the
interpreter's lock, holds up the process all the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)
GRACE_S = 2.0  # for a loop to show that it is not blocked, after a call on it ran out of time
SHOWN, TRACE = 200, 4000  # characters of an error's text, and of a traceback


@dataclass(frozen=True)
class Failed:
    """A call without an answer: ``reason`` is for the policy, ``trace`` for its author."""

    reason: str
    trace: str = ""


async def guarded(call: Callable[[], Any], *passes: type[Exception]) -> Any:
    """Return what a call returns, awaited where it can be, or Failed for whatever it raises.

    Only the errors ``passes`` come through, and a cancellation by the deadline or the run: a tool may raise
    CancelledError, SystemExit or KeyboardInterrupt itself, which would end the event loop.
    """
    try:
        found = call()
        return await found if inspect.isawaitable(found) else found
    except passes:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
            raise
        trace = traceback.format_exc(limit=-8)
        return Failed(
            described(error), trace if len(trace) <= TRACE else f"{trace[: TRACE // 2]}...{trace[-TRACE // 2 :]}"
        )


def described(error: BaseException) -> str:
    """Return an error's type and text in one line; its text may fail as well."""
    try:
        text = " ".join(str(error)[: 4 * SHOWN].split())
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}"[:SHOWN] if text else type(error).__name__


class ApartLoop:
    """An event loop on a thread of its own. One that a call blocks past its deadline is left behind for a new one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], Any], *passes: type[Exception]) -> Any:
        """Return :func:`guarded` of a call. To cancel it does not wait for code that ignores that."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="tools", daemon=True)
            self._thread.start()
        loop, thread = self._loop, self._thread
        future = asyncio.run_coroutine_threadsafe(guarded(call, *passes), loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # the deadline, or a sample that was given up
            self._watch(loop, thread)
            raise

    def close(self) -> None:
        """End the thread, unless a call blocks it. A second call does nothing."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._loop is loop:
            with suppress(BaseException):  # of what a tool left running there
                loop.run_forever()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Leave a loop behind that does not answer within GRACE_S; Python code that blocks it is interrupted."""
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)

        def leave() -> None:
            if answered.is_set() or self._loop is not loop:
                return
            self._loop = None
            log.warning(
                "a tool or user blocks its event loop past its deadline; the next calls get a new one. Await instead "
                "of blocking (asyncio.to_thread), or bound the time in the tool"
            )
            # Its other calls go on once the blocking one is interrupted; the thread then stays idle.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

        timer = threading.Timer(GRACE_S, leave)
        timer.daemon = True
        timer.start()
