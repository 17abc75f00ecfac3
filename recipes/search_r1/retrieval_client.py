"""The client of a retrieval server (``POST /retrieve``, the published format): ours, or any other that implements it.

A search either gets its passages or raises :class:`RetrievalError`; a failure never looks like "nothing found".

* A server that is away, busy, slow or broken is asked again, with growing, jittered pauses, for ``give_up_s``
  (:mod:`reward_scores.server_calls`): one that is killed and started again costs retries and no search, however many
  wait. A search that stays without an answer is an error. What can only be our own mistake (other 4xx) is one at once.
* A reply is read up to ``largest_reply`` bytes, and its scores are numbers; any other reply is an error.
* With ``cache_dir`` every answer is kept, by the fingerprint of the server's index; ``offline=True`` then repeats a
  run without a server.

Requests run on a thread of their own, so they advance while the caller's event loop decodes, and one client serves
several event loops, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from core.rewards.http_replies import BadReply, bounded
from recipes.search_r1.index.passages import QUERY_CHARS, Passage, RetrievalError
from recipes.search_r1.retrieval_cache import Cache, stores
from recipes.search_r1.wire import IDENTITY, from_wire, read_json
from reward_scores.server_calls import LARGEST_REPLY, Patience, asked_seconds, authorization

log = logging.getLogger(__name__)

WARN_S = 60.0  # between two warnings of a server that is away: an overloaded one may fail and answer in turn
FAILURES = ("connect", "timeout", "busy", "status", "reply")


@dataclass(frozen=True)
class ClientOptions:
    """Address, limits and retries of a client.

    Args:
        url: of ``/retrieve``; ``/health`` stands beside it.
        timeout_s: of one attempt.
        give_up_s: how long the server may be away, and how long the tries and pauses of one search may take.
        bad_replies: answers of one search that may be unreadable or of the wrong size before it fails.
        connections: requests at a time; others wait their turn.
        pause_s, longest_pause_s: the first pause before asking again, doubled until the longest.
        largest_reply: bytes of a reply that are read; a larger one is unreadable.
        api_key_env: the environment variable that holds the server's key, if it needs one.
        cache_dir: where answers are kept; None keeps none.
        offline: answer from the cache alone. ``identity`` chooses among several kept there.
    """

    url: str = "http://127.0.0.1:8000/retrieve"
    timeout_s: float = 30.0
    give_up_s: float = 300.0
    bad_replies: int = 3
    connections: int = 64
    pause_s: float = 0.1
    longest_pause_s: float = 5.0
    largest_reply: int = LARGEST_REPLY
    api_key_env: str | None = None
    cache_dir: str | Path | None = None
    offline: bool = False
    identity: str | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "give_up_s", "connections", "bad_replies", "largest_reply"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        authorization(self.api_key_env)  # a missing key is known before a thread starts
        if self.offline and self.cache_dir is None:
            raise ValueError("offline=True: there is no cache_dir to answer from; give the one of the earlier run")


class _Again(Exception):
    """An attempt failed in a way that may pass. Holds its kind, and how long the server requests to wait."""

    def __init__(self, kind: str, what: str, wait_s: float = 0.0):
        super().__init__(what)
        self.kind, self.wait_s = kind, wait_s


class RetrievalClient:
    """A retriever that searches a server; see the module's head. Several event loops and threads may use it."""

    def __init__(self, options: ClientOptions | None = None):
        self.options = options or ClientOptions()
        self.identity = self.options.identity
        self._cache: Cache | None = None
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._warned, self._warned_at = False, -WARN_S  # of a server that is away, and when
        options = self.options
        self._patience = Patience(options.give_up_s, options.pause_s, options.longest_pause_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="retrieval-client", daemon=True)
        self._thread.start()
        self._http = self._on_thread(self._connect()).result()
        if self.options.offline:
            self._open_cache(self.identity or _only_store(Path(self.options.cache_dir)))

    async def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return at most ``topk`` passages for every query, best first. Raises RetrievalError; cancelling is safe."""
        if not queries:
            return []
        return await asyncio.wrap_future(self._on_thread(self._retrieve(list(queries), topk)))

    def search_again(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return what the server finds now, without the cache and outside of the counts. Raises RetrievalError."""

        async def search() -> list[list[Passage]]:
            before = self._counts["attempts"]
            found = await self._searched([self._sendable(query) for query in queries], topk)
            self._counts["attempts"] = before
            return found

        return self._on_thread(search()).result()

    async def health(self) -> dict[str, Any]:
        """Return ``GET /health``, waiting at most ``give_up_s`` for a server to start. Raises RetrievalError."""
        return await asyncio.wrap_future(self._on_thread(self._health()))

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last call.

        ``error_rate``: failed attempts; ``seconds``: the mean of a search, waiting included; ``empty``: queries for
        which the index itself found nothing.
        """
        counts, seconds = self._taken() if self._loop.is_closed() else self._on_thread(self._take()).result()
        attempts, queries = counts["attempts"], counts["queries"]
        failed = {f"errors/{kind}": float(counts[kind]) for kind in FAILURES}
        values = {
            "searches": float(len(seconds)),
            "queries": float(queries),
            "attempts": float(attempts),
            "retries": float(counts["retries"]),
            "errors": sum(failed.values()),
            **failed,
            "error_rate": sum(failed.values()) / attempts if attempts else 0.0,
            "cache_hit_rate": counts["cached"] / queries if queries else 0.0,
            "empty": float(counts["empty"]),
            "cut_queries": float(counts["cut"]),
            "seconds": sum(seconds) / len(seconds) if seconds else 0.0,
        }
        return {f"retrieval/{name}": value for name, value in values.items()}

    def close(self) -> None:
        """End the connections and the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._on_thread(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- on the client's thread ---

    def _on_thread(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop.is_closed():
            work.close()
            raise RetrievalError("the retrieval client is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _take(self) -> tuple[Counter[str], list[float]]:
        return self._taken()

    def _taken(self) -> tuple[Counter[str], list[float]]:
        taken = self._counts, self._seconds
        self._counts, self._seconds = Counter(), []
        return taken

    async def _connect(self) -> httpx.AsyncClient:
        self._turn = asyncio.Semaphore(self.options.connections)
        limits = httpx.Limits(
            max_connections=self.options.connections, max_keepalive_connections=self.options.connections
        )
        # trust_env=False: a proxy of the environment must not come between us and the loopback
        arguments = bounded(self.options.largest_reply)
        arguments["headers"] |= authorization(self.options.api_key_env)
        return httpx.AsyncClient(limits=limits, timeout=self.options.timeout_s, trust_env=False, **arguments)

    async def _end(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()
        if self._cache is not None:
            self._cache.close()

    async def _retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        began = time.monotonic()
        queries = [self._sendable(query) for query in queries]
        self._counts["queries"] += len(queries)
        if self.options.cache_dir is not None and self._cache is None:
            await self._health()
        found = {query: self._cache.get(query, topk) for query in queries} if self._cache else {}
        self._counts["cached"] += sum(found.get(query) is not None for query in queries)
        missing = [query for query in dict.fromkeys(queries) if found.get(query) is None]
        if missing and self.options.offline:
            raise RetrievalError(f"offline: {self._cache.path} has no {topk} passages for {missing[0]!r}")
        if missing:
            answers = await self._searched(missing, topk)
            found |= dict(zip(missing, answers, strict=True))
            if self._cache is not None:
                self._cache.put(found, missing, topk)
        self._counts["empty"] += sum(not found[query] for query in queries)
        self._seconds.append(time.monotonic() - began)
        return [found[query] for query in queries]

    def _sendable(self, query: str) -> str:
        """Return text that JSON can carry, within the server's length: a policy may write anything."""
        if len(query) > QUERY_CHARS:
            self._counts["cut"] += 1
        return query[:QUERY_CHARS].encode("utf-8", "replace").decode()

    async def _searched(self, queries: list[str], topk: int) -> list[list[Passage]]:
        body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()

        def read(answer: httpx.Response) -> list[list[Passage]]:
            self._same_index(answer)
            try:
                return from_wire(read_json(answer.content), len(queries), topk)
            except RetrievalError as error:
                raise _Again("reply", str(error)) from error

        headers = {"content-type": "application/json"}
        return await self._asked(
            self._http.build_request("POST", self.options.url, content=body, headers=headers), read
        )

    async def _health(self) -> dict[str, Any]:
        url = httpx.URL(self.options.url).join("health")

        def read(answer: httpx.Response) -> dict[str, Any]:
            try:
                health = read_json(answer.content)
                identity = f"{health['corpus_hash']}-{health['fingerprint']}"
            except (RetrievalError, KeyError, TypeError) as error:
                raise _Again("reply", f"not the health of a retrieval server: {error!r}") from error
            self._meet(identity)
            return health

        return await self._asked(self._http.build_request("GET", url), read)

    async def _asked(self, request: httpx.Request, read: Any) -> Any:
        """Return the answer as ``read`` parses it. Repeats the request until it can, or raises RetrievalError."""
        failures: Counter[str] = Counter()
        spent_s = 0.0
        while True:
            async with self._turn:
                begun = time.monotonic()
                try:
                    answer = read(await self._attempt(request, max(0.01, self.options.give_up_s - spent_s)))
                except _Again as failure:
                    failures[failure.kind] += 1
                    spent_s += time.monotonic() - begun
                    pause = self._pause(request, failure, failures, begun, spent_s)
                else:
                    away_s = self._patience.answered()
                    if away_s and self._warned:
                        log.warning("%s: answers again after %.1f s", request.url, away_s)
                        self._warned = False
                    return answer
            await asyncio.sleep(pause)
            spent_s += pause

    async def _attempt(self, request: httpx.Request, left_s: float) -> httpx.Response:
        self._counts["attempts"] += 1
        # The whole attempt is bounded: httpx's own limit is that of each read, which a trickle of bytes would pass.
        seconds = min(self.options.timeout_s, left_s)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.send(request)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _Again("timeout", f"no answer in {seconds:.1f} s") from error
        except BadReply as error:
            raise _Again("reply", str(error)) from error
        except httpx.RequestError as error:
            raise _Again("connect", f"{type(error).__name__}: {error}") from error
        if answer.status_code in (429, 503):
            raise _Again("busy", f"status {answer.status_code}", asked_seconds(answer.headers.get("retry-after")))
        if answer.status_code >= 500:
            raise _Again("status", f"status {answer.status_code}: {answer.text[:200]}")
        if answer.status_code != 200:
            raise RetrievalError(f"{request.url}: status {answer.status_code}: {answer.text[:500]}")
        return answer

    def _pause(
        self, request: httpx.Request, failure: _Again, failures: Counter[str], begun: float, spent_s: float
    ) -> float:
        """Count a failed attempt and return the pause before the next one. Raises RetrievalError to give up."""
        self._counts[failure.kind] += 1
        if failures["reply"] >= self.options.bad_replies:
            raise RetrievalError(f"{request.url}: {failure}, {failures['reply']} times; is it a retrieval server?")
        first = not self._patience.away_s
        pause = self._patience.pause(begun, failures.total(), spent_s, failure.wait_s)
        if pause is None:
            told = ", ".join(f"{kind} {count}" for kind, count in failures.items())
            raise RetrievalError(
                f"{request.url}: no answer within give_up_s={self.options.give_up_s:g} s and {failures.total()} "
                f"attempts ({told}); last: {failure}. Is the server running (bash recipes/search_r1/run_retriever.sh)? "
                "Where it takes longer to start, raise retriever.client.give_up_s"
            ) from failure
        if first and time.monotonic() - self._warned_at > WARN_S:  # once, and not for every search that waits
            self._warned, self._warned_at = True, time.monotonic()
            log.warning("%s: %s; searches are tried again for %g s", request.url, failure, self.options.give_up_s)
        self._counts["retries"] += 1
        return pause

    def _same_index(self, answer: httpx.Response) -> None:
        identity = answer.headers.get(IDENTITY)
        if identity is not None:
            self._meet(identity)

    def _meet(self, identity: str) -> None:
        """Remember the index that the first answer names. Raises RetrievalError where a later answer names another."""
        if self.identity is None:
            self.identity = identity
        if identity != self.identity:
            raise RetrievalError(
                f"{self.options.url}: the server answers from index {identity}, the run began with {self.identity}; "
                "start it with the same corpus, back end and settings"
            )
        if self.options.cache_dir is not None and self._cache is None:
            self._open_cache(identity)

    def _open_cache(self, identity: str) -> None:
        self.identity = identity
        self._cache = Cache(Path(self.options.cache_dir), identity)


def _only_store(folder: Path) -> str:
    found = stores(folder)
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise RetrievalError(f"offline: {folder} must hold the answers of one index, it has {names}; give identity=")
    return found[0]
