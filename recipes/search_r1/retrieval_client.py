"""The client of a retrieval server: ours, or another with the published format.

A search either gets its passages or raises :class:`RetrievalError`; a failure never looks like
"nothing found".

* A server that is away, busy, slow or broken is asked again for ``give_up_s``
  (:mod:`reward_scores.http_client`): one that is killed and started again costs retries and no
  search, however many wait. A search that stays without an answer is an error. What can only be our
  own mistake (other 4xx) is one at once.
* A reply whose scores are not numbers, or that is longer than ``largest_reply``, is an error.
* With ``cache_dir`` every answer is kept, by the fingerprint of the server's index;
  ``offline=True`` then repeats a run without a server.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from recipes.search_r1.index.passages import QUERY_CHARS, Passage, RetrievalError
from recipes.search_r1.retrieval_cache import Cache, stores
from recipes.search_r1.wire import IDENTITY, from_wire, read_json
from reward_scores.http_client import (
    LARGEST_REPLY,
    HttpClient,
    HttpOptions,
    Reply,
    RequestFailed,
    may_pass,
)

FAILURES = ("connect", "timeout", "busy", "status", "reply")


@dataclass(frozen=True)
class ClientOptions:
    """Address, limits and retries of a client."""

    url: str = "http://127.0.0.1:8000/retrieve"  # ``/health`` stands beside it
    timeout_s: float = 30.0  # of one attempt
    # Seconds that the server may be away, and that the tries and pauses of one search may take
    give_up_s: float = 300.0
    bad_replies: int = 3  # unreadable answers, or of the wrong size, with which a search fails
    connections: int = 64  # requests at a time; others wait for their turn
    # The first pause before another try is doubled until the longest
    pause_s: float = 0.1
    longest_pause_s: float = 5.0
    largest_reply: int = LARGEST_REPLY  # bytes; a larger reply is unreadable
    api_key_env: str | None = None  # variable of the environment with the server's key
    cache_dir: str | Path | None = None  # where answers are kept; None keeps none
    offline: bool = False  # answer from the cache alone
    identity: str | None = None  # index that an offline client takes of those in the cache

    def __post_init__(self) -> None:
        for name in ("timeout_s", "give_up_s", "connections", "bad_replies", "largest_reply"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        authorization(self.api_key_env)  # a missing key is known before a thread starts
        if self.offline and self.cache_dir is None:
            fix = "give the one of the earlier run"
            raise ValueError(f"offline=True: there is no cache_dir to answer from; {fix}")


class RetrievalClient:
    """A retriever that searches a server. Several event loops and threads may use it."""

    def __init__(self, options: ClientOptions | None = None):
        options = options or ClientOptions()
        self.options = options
        self.identity = options.identity
        self._cache: Cache | None = None
        limits = HttpOptions(
            timeout_s=options.timeout_s,
            give_up_s=options.give_up_s,
            pause_s=options.pause_s,
            longest_pause_s=options.longest_pause_s,
            connections=options.connections,
            largest_reply=options.largest_reply,
            trust_env=False,  # no proxy may come between a run and the loopback
            authorization=authorization(options.api_key_env),
            retried=self._may_pass,
        )
        self._http = HttpClient("retrieval client", limits)
        if options.offline:
            self._open_cache(self.identity or _only_store(Path(options.cache_dir)))

    async def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return at most ``topk`` passages for every query, best first.

        Raises RetrievalError. Cancelling is safe.
        """
        if not queries:
            return []
        return await asyncio.wrap_future(self._start(self._retrieve(list(queries), topk)))

    async def health(self) -> dict[str, Any]:
        """Return ``GET /health``, waiting at most ``give_up_s`` for a server to start.

        Raises RetrievalError.
        """
        return await asyncio.wrap_future(self._start(self._health()))

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last call.

        ``error_rate``: failed attempts; ``seconds``: the mean of a search, waiting included;
        ``empty``: queries for which the index itself found nothing.
        """
        counts = self._http.take_counts()
        attempts = counts["attempts"]
        queries = counts["queries"]
        searches = counts["searches"]
        failed = {f"errors/{kind}": float(counts[kind]) for kind in FAILURES}
        values = {
            "searches": float(searches),
            "queries": float(queries),
            "attempts": float(attempts),
            "retries": float(counts["retries"]),
            "errors": sum(failed.values()),
            **failed,
            "error_rate": sum(failed.values()) / attempts if attempts else 0.0,
            "cache_hit_rate": counts["cached"] / queries if queries else 0.0,
            "empty": float(counts["empty"]),
            "cut_queries": float(counts["cut"]),
            "seconds": counts["seconds"] / searches if searches else 0.0,
        }
        return {f"retrieval/{name}": value for name, value in values.items()}

    def close(self) -> None:
        """End the connections, the thread and the cache. A second call does nothing."""
        self._http.close()
        if self._cache is not None:
            self._cache.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future:
        try:
            return self._http.submit(work)
        except RuntimeError as error:
            raise RetrievalError(str(error)) from None

    # --- on the client's thread ---

    def _may_pass(self, failure: RequestFailed, failures: Mapping[str, int]) -> bool:
        return may_pass(failure, failures) and failures["reply"] < self.options.bad_replies

    async def _retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        began = time.monotonic()
        queries = [self._sendable(query) for query in queries]
        self._http.counts["queries"] += len(queries)
        if self.options.cache_dir is not None and self._cache is None:
            await self._health()
        passages: dict[str, Any] = {}
        if self._cache is not None:
            passages = {query: self._cache.get(query, topk) for query in queries}
        self._http.counts["cached"] += sum(passages.get(query) is not None for query in queries)
        missing = [query for query in dict.fromkeys(queries) if passages.get(query) is None]
        if missing and self.options.offline:
            raise RetrievalError(
                f"offline: {self._cache.path} has no {topk} passages for {missing[0]!r}"
            )
        if missing:
            answers = await self._search(missing, topk)
            passages |= dict(zip(missing, answers, strict=True))
            if self._cache is not None:
                self._cache.put(passages, missing, topk)
        self._http.counts["empty"] += sum(not passages[query] for query in queries)
        self._http.counts["searches"] += 1
        self._http.counts["seconds"] += time.monotonic() - began
        return [passages[query] for query in queries]

    def _sendable(self, query: str) -> str:
        """Return text that JSON can carry, cut to the server's length.

        A policy may write anything.
        """
        if len(query) > QUERY_CHARS:
            self._http.counts["cut"] += 1
        return query[:QUERY_CHARS].encode("utf-8", "replace").decode()

    async def _search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        body = {"queries": queries, "topk": topk, "return_scores": True}

        def read(reply: Reply) -> list[list[Passage]]:
            self._same_index(reply)
            try:
                return from_wire(read_json(reply.content), len(queries), topk)
            except RetrievalError as error:
                raise RequestFailed("reply", str(error)) from error

        return await self._request("POST", self.options.url, body, read)

    async def _health(self) -> dict[str, Any]:
        def read(reply: Reply) -> dict[str, Any]:
            try:
                health = read_json(reply.content)
                identity = f"{health['corpus_hash']}-{health['fingerprint']}"
            except (RetrievalError, KeyError, TypeError) as error:
                reason = f"not the health of a retrieval server: {error!r}"
                raise RequestFailed("reply", reason) from error
            self._meet(identity)
            return health

        return await self._request("GET", urljoin(self.options.url, "health"), None, read)

    async def _request(self, method: str, url: str, body: Any, read: Callable[[Reply], Any]) -> Any:
        """Return what ``read`` makes of the reply. Raises RetrievalError where there is none."""
        try:
            return await self._http.request(method, url, body, read)
        except RequestFailed as failure:
            counts = failure.failures
            if failure.kind == "refused":
                raise RetrievalError(f"{url}: {failure}") from failure
            if counts["reply"] >= self.options.bad_replies:
                raise RetrievalError(
                    f"{url}: {failure}, {counts['reply']} times; is it a retrieval server?"
                ) from failure
            shown = ", ".join(f"{kind} {count}" for kind, count in counts.items())
            raise RetrievalError(
                f"{url}: no answer within give_up_s={self.options.give_up_s:g} s and "
                f"{counts.total()} attempts ({shown}); last: {failure}. Is the server running "
                "(bash recipes/search_r1/run_retriever.sh)? Where it takes longer to start, raise "
                "retriever.client.give_up_s"
            ) from failure

    def _same_index(self, reply: Reply) -> None:
        identity = reply.headers.get(IDENTITY)
        if identity is not None:
            self._meet(identity)

    def _meet(self, identity: str) -> None:
        """Remember the index that the first answer names.

        Raises RetrievalError where a later answer names another.
        """
        if self.identity is None:
            self.identity = identity
        if identity != self.identity:
            raise RetrievalError(
                f"{self.options.url}: the server answers from index {identity}, the run began "
                f"with {self.identity}; start it with the same corpus, back end and settings"
            )
        if self.options.cache_dir is not None and self._cache is None:
            self._open_cache(identity)

    def _open_cache(self, identity: str) -> None:
        self.identity = identity
        self._cache = Cache(Path(self.options.cache_dir), identity)


def _only_store(folder: Path) -> str:
    identities = stores(folder)
    if len(identities) != 1:
        names = ", ".join(identities) or "none"
        raise RetrievalError(
            f"offline: {folder} must hold the answers of one index, it has {names}; give identity="
        )
    return identities[0]


def authorization(variable: str | None) -> str | None:
    """Return the header for the key in a variable of the environment.

    It is a bearer's, unless the key names its own scheme. A key never stands in a configuration,
    which is recorded. Raises ValueError where the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"api_key_env={variable}: the variable is not set; export it before the run starts"
        )
    return key if " " in key else f"Bearer {key}"
