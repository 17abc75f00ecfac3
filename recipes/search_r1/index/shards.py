"""Exact search over slices of a flat index that several servers hold, on one machine or on many.

Each server opens the same files and maps its slice alone (``--shard 2/4``). A front (``--shards URL URL ...``) sends
every search to all of them and merges what they find: the best scores, and among equal ones the lowest ids. What it
answers is what one server over the whole index answers, bit for bit (tests/recipes/test_shards.py).
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from recipes.search_r1.index.passages import Passage, RetrievalError, id_order
from recipes.search_r1.wire import from_wire, read_json

# Slices begin at multiples of the rows that faiss multiplies at once: other blocks could round a score otherwise.
BLOCK = 1024
TIMEOUT_S, WAIT_S = 300.0, 3600.0  # of a search; and of servers that still open their index
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the servers are no web sites
MOST = 1024  # queries of a request, as the server has it


@dataclass(frozen=True)
class Slice:
    """The ``number``-th of ``count`` slices, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}of{self.count}"

    @classmethod
    def of(cls, text: str) -> Slice:
        """Read ``I/N``. Raises RetrievalError for anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise RetrievalError(f"shard={text}: must be I/N with I from 1 to N, as in 2/4")
        return cls(int(found[1]), int(found[2]))

    def rows(self, count: int) -> range:
        """Return the slice of these rows. Raises RetrievalError where it is empty."""
        blocks = -(-count // BLOCK)
        start, stop = (min(count, blocks * at // self.count * BLOCK) for at in (self.number - 1, self.number))
        if start == stop:
            raise RetrievalError(f"shard={self}: {count} passages are {blocks} blocks; use at most {blocks} shards")
        return range(start, stop)


class ShardedRetriever:
    """A retriever over the servers of all slices. Raises RetrievalError where they are not those of one index."""

    backend = "flat"

    def __init__(self, addresses: Sequence[str], wait_s: float = WAIT_S):
        self._addresses = [address.rstrip("/").removesuffix("/retrieve") for address in addresses]
        self._pool = ThreadPoolExecutor(len(self._addresses))
        found = list(self._pool.map(lambda address: _health(address, wait_s), self._addresses))
        prints = [each["fingerprint"].partition("-") for each in found]
        whole = {(each["corpus_hash"], name) for each, (name, _, _) in zip(found, prints, strict=True)}
        slices = sorted(part for _, _, part in prints)
        wanted = sorted(str(Slice(number + 1, len(found))) for number in range(len(found)))
        if len(whole) != 1 or slices != wanted:
            told = ", ".join(f"{a}: {each['fingerprint']}" for a, each in zip(self._addresses, found, strict=True))
            raise RetrievalError(f"shards: not every slice of one index ({told}); start --shard 1/N to N/N over it")
        ((self.corpus_hash, self.fingerprint),) = whole
        self._rows = sum(each["rows"] for each in found)

    def __len__(self) -> int:
        return self._rows

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        answers: list[list[Passage]] = []
        for start in range(0, len(queries), MOST):
            body = {"queries": queries[start : start + MOST], "topk": topk, "return_scores": True}
            found = list(self._pool.map(lambda address, body=body: _search(address, body), self._addresses))
            for parts in zip(*found, strict=True):
                answers.append(sorted((passage for part in parts for passage in part), key=id_order)[:topk])
        return answers


def _search(address: str, body: dict[str, Any]) -> list[list[Passage]]:
    reply = _request(f"{address}/retrieve", json.dumps(body).encode())
    return from_wire(reply, len(body["queries"]), body["topk"])


def _health(address: str, wait_s: float) -> dict[str, Any]:
    """Return what a server tells of itself, once it answers."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return _request(f"{address}/health")
        except RetrievalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _request(url: str, body: bytes | None = None) -> Any:
    """Return the reply's JSON. Raises RetrievalError with the address where there is none."""
    try:
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with DIRECT.open(request, timeout=TIMEOUT_S) as reply:
            return read_json(reply.read())
    except (OSError, HTTPException, RetrievalError) as error:
        raise RetrievalError(f"shards: {url} does not answer ({error}); start that server again") from error
