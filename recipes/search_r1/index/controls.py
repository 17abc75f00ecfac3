"""Retrievers that are controls of an experiment: passages that do not fit, and none.

They show how much of a result is owed to the passages. No recipe trains with them unless its
command names one.
"""

from __future__ import annotations

import random

from recipes.search_r1.index.corpus import Corpus
from recipes.search_r1.index.passages import Passage, fingerprint


class ControlRetriever:
    """A control: ``random`` finds passages unrelated to the query, the same ones for the same
    query; ``empty`` none."""

    def __init__(self, corpus: Corpus, backend: str):
        self._corpus = corpus
        self.backend = backend
        self.corpus_hash = corpus.hash
        self.fingerprint = fingerprint(backend, corpus.hash)

    def __len__(self) -> int:
        return len(self._corpus)

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return [self._draw(query, topk) if self.backend == "random" else [] for query in queries]

    def _draw(self, query: str, topk: int) -> list[Passage]:
        rows = random.Random(query).sample(range(len(self)), min(topk, len(self)))
        return self._corpus.passages(rows, [0.0] * len(rows))
