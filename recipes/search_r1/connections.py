"""Bound the connections of a uvicorn server: it has no bound on clients that send half a request or read half a reply.

A connection waits for its client until a request is complete, while a reply is not read, and between requests. Each of
these waits ends; and where there are too many connections, the one that waits longest makes room for the next. So
nobody can lock others out by opening connections.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

REQUEST_S = 10.0  # for a whole request, and for a client to read on
IDLE_S = 60.0  # between requests
OTHER_FILES = 128  # of the process: index, corpus, libraries


def bounded_protocol(most: int, request_s: float = REQUEST_S, idle_s: float = IDLE_S) -> type:
    """Return uvicorn's protocol with at most ``most`` connections, none of which waits for its client for ever."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    waiting: dict[Any, asyncio.TimerHandle] = {}  # in the order in which they began to wait

    class Bounded(AutoHTTPProtocol):
        _begun = False  # whether a request is on its way: its time begins with its first byte

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait(request_s)
            while len(self.connections) > most and waiting:
                next(iter(waiting))._end()

        def data_received(self, data: bytes) -> None:
            if not self._begun:
                self._begun = True
                self._wait(request_s)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
                self._go_on()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._begun = self.cycle.more_body  # a reply may be complete before its request is
            if not self.transport.is_closing():
                self._wait(request_s if self._begun else idle_s)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait(request_s)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._go_on()

        def connection_lost(self, exc: Exception | None) -> None:
            self._go_on()
            super().connection_lost(exc)

        def _wait(self, seconds: float) -> None:
            self._go_on()
            waiting[self] = self.loop.call_later(seconds, self._end)

        def _go_on(self) -> None:
            if timer := waiting.pop(self, None):
                timer.cancel()

        def _end(self) -> None:
            self._go_on()
            self.connections.discard(self)
            self.transport.abort()

    return Bounded


def most_connections(wanted: int) -> int:
    """Return how many of the wanted connections the process may have, after raising its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OTHER_FILES))
