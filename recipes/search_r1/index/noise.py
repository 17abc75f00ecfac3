"""A ranking that is worse than its index's: for studies of what the number of passages is worth.

On a small corpus an index puts the right passage first nearly always, and one passage is enough. Here the first one of
every search falls behind the next with probability ``noise``, then behind the one after it with the same probability,
and so on: it is among the first k with probability 1 - noise^k, where that many are found. What it passes moves up.
"""

from __future__ import annotations

import hashlib
import random

from recipes.search_r1.index.passages import Passage, RetrievalError, Retriever, fingerprint

DEPTH = 10  # passages among which it falls; the ranking does not depend on how many are shown


class NoisyRetriever:
    """Another retriever, whose first passage falls. Where it falls to is a function of ``seed`` and query alone, so
    that a search repeats, and a replay is exact. Raises RetrievalError for a ``noise`` that is no probability."""

    def __init__(self, inner: Retriever, noise: float, seed: int):
        if not 0 <= noise < 1:
            raise RetrievalError(f"noise={noise}: must be at least 0 and below 1")
        self._inner, self._noise, self._seed = inner, noise, seed
        self.corpus_hash = inner.corpus_hash
        self.backend = f"{inner.backend}+noise"
        self.fingerprint = fingerprint(inner.fingerprint, "noise", noise, seed)

    def __len__(self) -> int:
        return len(self._inner)

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        found = self._inner.retrieve(queries, max(topk, DEPTH))
        return [self._fallen(query, passages)[:topk] for query, passages in zip(queries, found, strict=True)]

    def _fallen(self, query: str, passages: list[Passage]) -> list[Passage]:
        rng = random.Random(hashlib.sha256(f"{self._seed} {query}".encode("utf-8", "replace")).digest())
        rank = 0
        while rank < len(passages) - 1 and rng.random() < self._noise:
            rank += 1
        return [*passages[1 : rank + 1], *passages[:1], *passages[rank + 1 :]]
