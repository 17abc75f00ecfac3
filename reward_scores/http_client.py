"""The HTTP client of a run's servers: judge, retriever, Sandbox Fusion, SGLang. What is sent and read is theirs.

* Requests run on an event loop in a thread of their own, so that they advance while the caller's loop decodes or
  updates; a client serves several loops and threads.
* A failure that a later attempt mends is no failure: a server that restarts costs retries and no answer. A client gives
  up where the server answered nobody for ``give_up_s`` seconds, or where the attempts and pauses of one request took as
  long though others were answered. Time in which a request waits for its turn counts as neither, so that the budget
  does not depend on how many requests wait.
* An attempt is bounded from connecting to the last byte: httpx's own limit is that of each read, which a trickle of
  bytes would pass. A reply is bounded too: a broken server must not fill the memory.

It is here, and not in core, because a scorer uses it too; scorers import it only where they have a server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import tenacity

log = logging.getLogger(__name__)

LARGEST_REPLY = 64 * 2**20  # bytes
LONGEST_RETRY_AFTER_S = 120.0
WARN_S = 60.0  # between two warnings of a server that is away: an overloaded one may fail and answer in turn
BUSY = (408, 409, 425, 429, 503)  # statuses that pass without anybody's doing


class RequestFailed(Exception):
    """A request without a usable reply.

    ``kind`` is connect, timeout, busy, status (500 and above), refused (other statuses: the request is at fault) or
    reply (too long, unreadable). ``wait_s`` is the server's Retry-After. ``failures`` counts the failed attempts of the
    request by their kinds; ``may_pass`` tells whether another attempt was worthwhile.
    """

    def __init__(self, kind: str, message: str, status: int = 0, wait_s: float = 0.0):
        super().__init__(message)
        self.kind, self.status, self.wait_s = kind, status, wait_s
        self.failures: Counter[str] = Counter()
        self.may_pass = False


class ReplyTooLong(RequestFailed):
    """The reply has more than ``largest_reply`` bytes."""

    def __init__(self, largest: int):
        super().__init__("reply", f"the reply has more than {largest} bytes")


def may_pass(failure: RequestFailed, failures: Mapping[str, int]) -> bool:
    """Return whether another attempt may succeed, the usual rule: unless the request itself is at fault."""
    return failure.kind != "refused"


@dataclass(frozen=True)
class HttpOptions:
    """Limits and retries of a client.

    Args:
        timeout_s: of one attempt.
        give_up_s: how long the server may be away, and how long the attempts and pauses of one request may take; 0:
            there is one attempt.
        pause_s, longest_pause_s: the first pause before another attempt, doubled until the longest, and jittered. What
            the server requests by Retry-After comes on top.
        connections: attempts at a time; others wait for their turn.
        keep_alive: whether a connection serves several requests.
        trust_env: whether the proxies of the environment apply; none must come between us and the loopback.
        retried: whether a failed attempt is repeated, from the failure and the counts of the request's failures.
    """

    timeout_s: float
    give_up_s: float = 0.0
    pause_s: float = 0.5
    longest_pause_s: float = 20.0
    connections: int = 64
    keep_alive: bool = True
    largest_reply: int = LARGEST_REPLY
    trust_env: bool = True
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key
    retried: Callable[[RequestFailed, Mapping[str, int]], bool] = may_pass


@dataclass(frozen=True)
class Reply:
    """A reply with a good status, read to its end."""

    status: int
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
            raise RequestFailed("reply", f"the reply is not JSON ({error}): {self.text[:80]!r}") from error


@dataclass
class _Request:
    """A request, and what its failed attempts came to; the fields are the arguments of :meth:`HttpClient.request`."""

    method: str
    url: str
    body: Any
    read: Callable[[Reply], Any]
    headers: Mapping[str, str] | None
    turn: Callable[[], AbstractAsyncContextManager]
    end: float
    failures: Counter[str] = field(default_factory=Counter)
    spent_s: float = 0.0


class BackgroundLoop:
    """An event loop in a daemon thread."""

    def __init__(self, name: str):
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future:
        """Start a coroutine on the thread; return its future. Raises RuntimeError once the loop is closed."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError(f"the {self.name} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns on the thread, on which nothing else runs meanwhile."""
        if self._loop.is_closed():
            return function()

        async def run() -> Any:
            return function()

        return self.submit(run()).result()

    def close(self, cleanup: Callable[[], Awaitable[None]]) -> None:
        """Cancel what runs, await ``cleanup`` and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await cleanup()

        self.submit(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HttpClient:
    """A client of one server; see the module's head. Coroutines run on its ``loop``.

    ``counts`` has the attempts of requests, the retries, and the failed attempts by their kinds.
    """

    def __init__(self, name: str, options: HttpOptions):
        self.options = options
        self.loop = BackgroundLoop(name)
        self.counts: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(options.connections)
        kept = options.connections if options.keep_alive else 0
        self._http = httpx.AsyncClient(
            headers={"accept-encoding": "identity", **options.headers},  # the size of a compressed reply is not known
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept),
            trust_env=options.trust_env,
            follow_redirects=True,
        )
        self._answered_at = time.monotonic()
        self._away_since: float | None = None
        self._warned, self._warned_at = False, -WARN_S

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call."""

        def take() -> Counter[str]:
            taken, self.counts = self.counts, Counter()
            return taken

        return self.loop.call(take)

    def close(self) -> None:
        """End requests, connections and the thread. A second call does nothing."""
        self.loop.close(self._http.aclose)

    # -- on the thread ---------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        url: str,
        body: Any = None,
        read: Callable[[Reply], Any] = lambda reply: reply,
        *,
        headers: Mapping[str, str] | None = None,
        turn: Callable[[], AbstractAsyncContextManager] | None = None,
        end: float = math.inf,
    ) -> Any:
        """Send a request until ``read`` returns what its reply holds.

        Args:
            body: sent as JSON, unless it is None. A function is called for each attempt.
            read: may raise RequestFailed for a reply that another attempt may better.
            turn: what an attempt waits for, in place of the client's ``connections``.
            end: by ``time.monotonic()``, of the last attempt.

        Raises:
            RequestFailed: that of the last attempt.
        """
        request = _Request(method, url, body, read, headers, turn or (lambda: self._turns), end)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, RequestFailed) and error.may_pass),
            wait=self._pause,
            stop=lambda state: self._gives_up(request, state),
            before_sleep=lambda state: self._note_retry(url, state),
            reraise=True,
        )
        return await retrying(self._attempt, request)

    async def _attempt(self, request: _Request) -> Any:
        async with request.turn():
            begun = time.monotonic()
            self.counts["attempts"] += 1
            body = request.body() if callable(request.body) else request.body
            try:
                reply = await self.send_once(request.method, request.url, body, request.headers, request.end - begun)
                result = request.read(reply)
            except RequestFailed as failure:
                self._note_failure(request, failure, begun)
                raise
        self._note_answer(request.url)
        return result

    def _note_failure(self, request: _Request, failure: RequestFailed, begun: float) -> None:
        request.failures[failure.kind] += 1
        self.counts[failure.kind] += 1
        failure.failures = request.failures
        failure.may_pass = self.options.retried(failure, request.failures)
        if not failure.may_pass:  # the server is there
            self._note_answer(request.url)
            return
        request.spent_s += time.monotonic() - begun
        # An attempt from before the last answer tells nothing of the time before that
        self._away_since = self._away_since or max(begun, self._answered_at)

    def _gives_up(self, request: _Request, state: tenacity.RetryCallState) -> bool:
        now, pause = time.monotonic(), state.upcoming_sleep
        away_s = now - (self._away_since or now)
        spent_s = request.spent_s + state.idle_for
        return max(away_s, spent_s) + pause >= self.options.give_up_s or now + pause >= request.end

    async def lines(self, method: str, url: str, body: Any) -> AsyncIterator[str]:
        """Yield the lines of a reply as they come: one attempt, whose reads are bounded in time, and not its length."""
        seconds = self.options.timeout_s
        with _failures(seconds):
            async with self._turns, self._stream(method, url, body, timeout=seconds) as response:
                if response.status_code != 200:
                    raise _of_status(response, await self._read(response))
                async for line in response.aiter_lines():
                    yield line

    async def send_once(
        self,
        method: str,
        url: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        longest_s: float = math.inf,
    ) -> Reply:
        """Return the reply to one attempt, which waits for no turn and is not counted. Raises RequestFailed."""
        seconds = min(longest_s, self.options.timeout_s)
        # A server that does not even accept the connection in half of the time is away, and not slow
        limits = httpx.Timeout(None, connect=seconds / 2)
        with _failures(seconds):
            async with asyncio.timeout(seconds), self._stream(method, url, body, headers, limits) as response:
                content = await self._read(response)
        if not response.is_success:
            raise _of_status(response, content)
        return Reply(response.status_code, response.headers, content)

    def _stream(self, method: str, url: str, body: Any, headers: Mapping[str, str] | None = None, timeout: Any = None):
        sent = dict(headers or {})
        if body is None:
            return self._http.stream(method, url, headers=sent, timeout=timeout)
        content = json.dumps(body).encode()  # ASCII: text may hold half of a surrogate pair
        sent["content-type"] = "application/json"
        return self._http.stream(method, url, content=content, headers=sent, timeout=timeout)

    async def _read(self, response: httpx.Response) -> bytes:
        encoding, largest = response.headers.get("content-encoding", "identity"), self.options.largest_reply
        if encoding != "identity":
            raise RequestFailed("reply", f"the reply is compressed ({encoding}), which was not requested")
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if len(content) > largest:
                raise ReplyTooLong(largest)
        return bytes(content)

    def _pause(self, state: tenacity.RetryCallState) -> float:
        grown = tenacity.wait_exponential(self.options.pause_s, self.options.longest_pause_s)(state)
        return state.outcome.exception().wait_s + grown * random.Random().uniform(0.5, 1.0)

    def _note_retry(self, url: str, state: tenacity.RetryCallState) -> None:
        self.counts["retries"] += 1
        now = time.monotonic()
        if not self._warned and now - self._warned_at > WARN_S:  # once, and not for every request that waits
            self._warned, self._warned_at = True, now
            failure, seconds = state.outcome.exception(), self.options.give_up_s
            log.warning("%s: %s; requests are tried again for %g s", url, failure, seconds)

    def _note_answer(self, url: str) -> None:
        now = time.monotonic()
        if self._warned and self._away_since is not None:
            log.warning("%s: answers again after %.1f s", url, now - self._away_since)
            self._warned = False
        self._answered_at, self._away_since = now, None


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
        return RequestFailed("busy", message, status, retry_after_seconds(response.headers.get("retry-after")))
    return RequestFailed("status" if status >= 500 else "refused", message, status)


def retry_after_seconds(value: str | None) -> float:
    """Return ``Retry-After`` in seconds; a date or an unreadable value counts as none."""
    try:
        return min(LONGEST_RETRY_AFTER_S, max(0.0, float(value or 0)))
    except ValueError:
        return 0.0


def authorization(variable: str | None) -> dict[str, str]:
    """Return the header for the key in an environment variable: a bearer's, unless it names its own scheme.

    Raises ValueError where the variable is not set. A key never stands in a configuration, which is recorded.
    """
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"api_key_env={variable}: the variable is not set; export it before the run starts")
    return {"authorization": key if " " in key else f"Bearer {key}"}
