"""The HTTP client of a run's servers: judge, retriever, Sandbox Fusion, SGLang. What is sent and
read is theirs.

It is here, and not in core, because a scorer uses it too; scorers import it only where they have a
server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

log = logging.getLogger(__name__)

LARGEST_REPLY = 64 * 2**20  # bytes
LONGEST_RETRY_AFTER_S = 120.0
# Between two warnings of a server that is away: an overloaded one may fail and answer in turn
WARN_S = 60.0
BUSY = (408, 409, 425, 429, 503)  # statuses that pass without anybody's doing


class RequestFailed(Exception):
    """A request without a usable reply.

    ``kind`` is connect, timeout, busy, status (500 and above), refused (other statuses: the request
    is at fault) or reply (too long, unreadable). ``wait_s`` is the server's Retry-After.
    ``failures`` counts the failed attempts of the request by their kinds; ``may_pass`` tells
    whether another attempt was worthwhile.
    """

    def __init__(self, kind: str, message: str, status: int = 0, wait_s: float = 0.0):
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.wait_s = wait_s
        self.failures: Counter[str] = Counter()
        self.may_pass = False


class ReplyTooLong(RequestFailed):
    """The reply has more than ``largest_reply`` bytes: a broken server must not fill the memory."""

    def __init__(self, largest: int):
        super().__init__("reply", f"the reply has more than {largest} bytes")


def may_pass(failure: RequestFailed, failures: Mapping[str, int]) -> bool:
    """Return whether another attempt may succeed, the usual rule: unless the request itself is at
    fault."""
    return failure.kind != "refused"


@dataclass(frozen=True)
class HttpOptions:
    """Limits and retries of a client."""

    timeout_s: float  # of one attempt, from connecting to the last byte
    # Seconds that the server may be away, and that the attempts and pauses of one request may take;
    # 0: there is one attempt
    give_up_s: float = 0.0
    # The first pause before another attempt is doubled until the longest, and jittered. What the
    # server requests by Retry-After comes on top.
    pause_s: float = 0.5
    longest_pause_s: float = 20.0
    connections: int = 64  # requests at a time; others wait for their turn
    keep_alive: bool = True
    largest_reply: int = LARGEST_REPLY
    trust_env: bool = True  # whether the proxies of the environment apply
    authorization: str | None = field(default=None, repr=False)  # the header's value
    # (failure, counts of the request's failures) -> whether the attempt is repeated
    retried: Callable[[RequestFailed, Mapping[str, int]], bool] = may_pass


@dataclass(frozen=True)
class Reply:
    """A reply with a good status, read to its end."""

    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Return the content as JSON. Raises RequestFailed where it is none."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError) as error:
            raise RequestFailed(
                "reply", f"the reply is not JSON ({error}): {self.text[:80]!r}"
            ) from error


class HttpClient:
    """A client of one server. Its coroutines run on an event loop in a thread of its own
    (:meth:`submit`).

    They advance there while the caller's loop decodes or updates. ``counts`` has the attempts of
    requests, the retries, and the failed attempts by their kinds.
    """

    def __init__(self, name: str, options: HttpOptions):
        self.name = name
        self.options = options
        self.counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(options.connections)
        kept = options.connections if options.keep_alive else 0
        self._http = httpx.AsyncClient(
            headers={"authorization": options.authorization} if options.authorization else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept),
            trust_env=options.trust_env,
            follow_redirects=True,
        )
        self._away_since: float | None = None  # the first failure after the server's last answer
        self._failed_at = -math.inf  # the latest failure
        self._warned_at = -math.inf
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future:
        """Start a coroutine on the thread; return its future. Raises RuntimeError once the client
        is closed."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError(f"the {self.name} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call, from any thread."""
        now = Counter(self.counts)
        new = now - self._taken
        self._taken = now
        return new

    def close(self) -> None:
        """End requests, connections and the thread. A second call does nothing."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._http.aclose()

        self.submit(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- on the thread ---------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        url: str,
        body: Any = None,
        read: Callable[[Reply], Any] = lambda reply: reply,
    ) -> Any:
        """Send a request until ``read`` returns what its reply holds; raise RequestFailed of the
        last attempt.

        A server that restarts costs retries and no answer. The client gives up where the server
        answered nobody for ``give_up_s``, or where one request took as long. Waiting for a turn
        counts as neither, so that the budget does not depend on how many requests wait. ``body`` is
        sent as JSON; a function is called for each attempt. ``read`` may raise RequestFailed for a
        reply that another attempt may better.
        """
        failures: Counter[str] = Counter()
        async with self._turns:
            begun = time.monotonic()
            while True:
                self.counts["attempts"] += 1
                try:
                    result = read(
                        await self.send_once(method, url, body() if callable(body) else body)
                    )
                    self._away_since = None
                    return result
                except RequestFailed as failure:
                    pause = self._pause(failure, failures, begun)
                    if pause is None:
                        raise
                    # Once, and not for every request that waits
                    if self._warned_at < time.monotonic() - WARN_S:
                        self._warned_at = time.monotonic()
                        log.warning(
                            "%s: %s; requests are repeated for %g s",
                            url,
                            failure,
                            self.options.give_up_s,
                        )
                self.counts["retries"] += 1
                await asyncio.sleep(pause)

    def _pause(self, failure: RequestFailed, failures: Counter[str], begun: float) -> float | None:
        """Count a failed attempt; return the seconds before the next one, or None where there is
        none."""
        options = self.options
        now = time.monotonic()
        failures[failure.kind] += 1
        self.counts[failure.kind] += 1
        failure.failures = failures
        failure.may_pass = options.retried(failure, failures)
        if not failure.may_pass:  # the server is there
            self._away_since = None
            return None
        # After a time without requests nobody knows since when the server is away
        idle = now - self._failed_at > options.give_up_s + options.timeout_s
        if self._away_since is None or idle:
            self._away_since = now
        self._failed_at = now
        grown = min(options.longest_pause_s, options.pause_s * 2 ** min(failures.total() - 1, 30))
        pause = failure.wait_s + grown * random.Random().uniform(0.5, 1.0)
        return pause if now + pause - min(begun, self._away_since) < options.give_up_s else None

    async def lines(self, method: str, url: str, body: Any) -> AsyncIterator[str]:
        """Yield the lines of a reply as they come. Its reads are bounded in time, and not its
        length.

        The reply is waited for as :meth:`request` does, but once it has begun it is not requested
        again.
        """
        seconds = self.options.timeout_s
        failures: Counter[str] = Counter()
        begun = time.monotonic()
        answered = False
        while True:
            try:
                with _failures(seconds):
                    async with self._turns, self._stream(method, url, body, seconds) as response:
                        if response.status_code != 200:
                            raise _of_status(response, await self._read(response))
                        self._away_since = None
                        answered = True
                        async for line in response.aiter_lines():
                            yield line
                return
            except RequestFailed as failure:
                pause = self._pause(failure, failures, begun)
                if pause is None or answered:
                    raise
            await asyncio.sleep(pause)

    async def send_once(
        self, method: str, url: str, body: Any = None, longest_s: float = math.inf
    ) -> Reply:
        """Return the reply to one attempt, which waits for no turn and is not counted. Raises
        RequestFailed."""
        seconds = min(longest_s, self.options.timeout_s)
        # A server that does not even accept the connection in half of the time is away, and not
        # slow. httpx's own limit is that of each read, which a trickle of bytes would pass.
        limits = httpx.Timeout(None, connect=seconds / 2)
        with _failures(seconds):
            async with (
                asyncio.timeout(seconds),
                self._stream(method, url, body, limits) as response,
            ):
                content = await self._read(response)
        if not response.is_success:
            raise _of_status(response, content)
        return Reply(response.headers, content)

    def _stream(self, method: str, url: str, body: Any, timeout: Any):
        if body is None:
            return self._http.stream(method, url, timeout=timeout)
        content = json.dumps(body).encode()  # ASCII: text may hold half of a surrogate pair
        headers = {"content-type": "application/json"}
        return self._http.stream(method, url, content=content, headers=headers, timeout=timeout)

    async def _read(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > self.options.largest_reply:
                raise ReplyTooLong(self.options.largest_reply)
        return bytes(content)


@contextmanager
def _failures(seconds: float) -> Iterator[None]:
    """Turn what httpx raises into RequestFailed."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise RequestFailed("connect", f"no connection in {seconds / 2:.1f} s") from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise RequestFailed("timeout", f"no answer in {seconds:.1f} s") from error
    except httpx.RequestError as error:
        raise RequestFailed("connect", f"{type(error).__name__}: {error}") from error
    except httpx.InvalidURL as error:
        raise RequestFailed("refused", f"no address: {error}") from error


def _of_status(response: httpx.Response, content: bytes) -> RequestFailed:
    status = response.status_code
    message = f"status {status}: {content[:1000].decode(errors='replace')}"
    if status in BUSY:
        return RequestFailed(
            "busy", message, status, retry_after_seconds(response.headers.get("retry-after"))
        )
    return RequestFailed("status" if status >= 500 else "refused", message, status)


def retry_after_seconds(value: str | None) -> float:
    """Return ``Retry-After`` in seconds; a date or an unreadable value counts as none."""
    try:
        return min(LONGEST_RETRY_AFTER_S, max(0.0, float(value or 0)))
    except ValueError:
        return 0.0
