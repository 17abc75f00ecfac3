"""Retrievers: what one is, and how one is opened in this process.

A corpus is a file of ``{"id", "contents"}`` lines; the first line of ``contents`` is the title, as in Search-R1.
``python -m data_preprocess.build_index`` makes an index folder from it, :func:`make_retriever` opens one, and
``retrieval_server`` puts one behind HTTP. All answer :class:`Retriever`, so that the lab needs no server.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from recipes.search_r1.index.corpus import Corpus

DENSE = ("flat", "hnsw", "ivf")
BACKENDS = ("bm25", *DENSE, "random", "empty")
IDENTITY = "x-index"  # header of our server's answers: corpus hash and fingerprint
QUERY_CHARS = 4096  # the client cuts a longer query instead of failing: the policy writes it


class RetrievalError(RuntimeError):
    """A search that cannot be answered: an index that does not fit, or a server that does not do its work."""


@dataclass(frozen=True)
class Passage:
    """One passage found. ``score`` grows with relevance: BM25, an inner product, or a cross-encoder's logit."""

    id: str
    contents: str
    score: float

    @property
    def title(self) -> str:
        """The first line, with its quotation marks where the corpus has them."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        return self.contents.partition("\n")[2]


class Retriever(Protocol):
    """``corpus_hash`` names the passages; ``fingerprint`` names passages, index and settings together, so equal
    fingerprints answer equally."""

    corpus_hash: str
    fingerprint: str
    backend: str

    def __len__(self) -> int: ...

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """At most ``topk`` passages for every query, best first. Dense indices always find ``topk``; BM25 finds
        fewer, or none, where fewer share a word with the query."""
        ...


@dataclass(frozen=True)
class RetrieverOptions:
    """What to open.

    Args:
        index: a folder that ``build_index`` made, or a faiss file (the published ones), which then needs ``corpus``
            and ``encoder``.
        corpus: the jsonl file; by default the one that the folder was built from.
        backend: one of :data:`BACKENDS`; by default the only one that the folder holds. ``random`` and ``empty``
            are controls: passages that have nothing to do with the query, and none.
        encoder: folder or hub id of the encoder; by default what the folder was built with. With it come
            ``query_prefix``, ``passage_prefix``, ``pooling`` (mean or cls) and ``max_length`` in tokens; None means
            the folder's, or E5's for a faiss file.
        device: of encoder and cross-encoder.
        mmap: leaves on disk what can be read from there.
        threads: of faiss and of torch on the CPU; None is their own default.
        ef_search, nprobe: HNSW's candidates and IVF's lists a query looks at.
        rerank: folder or hub id of a cross-encoder, which orders the first ``rerank_from`` passages anew.
        noise: probability with which the first passage falls behind the next one, again and again, as a function of
            ``noise_seed`` and query; for studies.
        check_encoder: encode a few passages at start and compare them with the index.
    """

    index: str | Path
    corpus: str | Path | None = None
    backend: str | None = None
    encoder: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    pooling: str | None = None
    max_length: int | None = None
    device: str = "cpu"
    mmap: bool = True
    threads: int | None = None
    ef_search: int = 128
    nprobe: int = 32
    rerank: str | None = None
    rerank_from: int = 10
    noise: float = 0.0
    noise_seed: int = 1
    check_encoder: bool = True


def make_retriever(options: RetrieverOptions) -> Retriever:
    """Opens an index. Raises RetrievalError where corpus, index and encoder do not belong together."""
    from recipes.search_r1.index.opening import open_index

    return open_index(options)


def fingerprint(*parts: Any) -> str:
    """16 hexadecimal digits of what decides an answer."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


class RandomRetriever:
    """Passages that have nothing to do with the query: a control. The same query finds the same ones."""

    backend = "random"

    def __init__(self, corpus: Corpus):
        self._corpus = corpus
        self.corpus_hash = corpus.hash
        self.fingerprint = fingerprint(self.backend, corpus.hash)

    def __len__(self) -> int:
        return len(self._corpus)

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return [self._draw(query, topk) for query in queries]

    def _draw(self, query: str, topk: int) -> list[Passage]:
        rows = random.Random(query).sample(range(len(self)), min(topk, len(self)))
        return self._corpus.passages(rows, [0.0] * len(rows))


class EmptyRetriever:
    """Finds nothing: a control."""

    backend = "empty"

    def __init__(self, corpus: Corpus):
        self._rows = len(corpus)
        self.corpus_hash = corpus.hash
        self.fingerprint = fingerprint(self.backend, corpus.hash)

    def __len__(self) -> int:
        return self._rows

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return [[] for _ in queries]


def to_wire(found: Sequence[Sequence[Passage]], return_scores: bool) -> dict[str, Any]:
    """The published answer of ``POST /retrieve``; without scores the documents stand alone."""
    documents = [[{"id": p.id, "contents": p.contents} for p in passages] for passages in found]
    if not return_scores:
        return {"result": documents}
    scored = [
        [{"document": document, "score": passage.score} for document, passage in zip(row, passages, strict=True)]
        for row, passages in zip(documents, found, strict=True)
    ]
    return {"result": scored}


def from_wire(answer: Any, queries: int, topk: int) -> list[list[Passage]]:
    """The passages of a scored answer. Raises RetrievalError, saying what is wrong, where it does not fit."""
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list):
        raise RetrievalError(f"the answer has no list 'result', it is {str(answer)[:80]!r}")
    if len(result) != queries:
        raise RetrievalError(f"the answer has {len(result)} results for {queries} queries")
    return [_passages(items, topk) for items in result]


def _passages(items: Any, topk: int) -> list[Passage]:
    if not isinstance(items, list) or len(items) > topk:
        has = f"{len(items)} passages" if isinstance(items, list) else type(items).__name__
        raise RetrievalError(f"a result has {has}, asked for were at most {topk}")
    try:
        return [
            Passage(str(item["document"].get("id", "")), _text(item["document"]["contents"]), float(item["score"]))
            for item in items
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RetrievalError(f"a passage is not {{document: {{id, contents}}, score}} ({error!r})") from error


def _text(contents: Any) -> str:
    if not isinstance(contents, str):
        raise TypeError(f"contents is a {type(contents).__name__}")
    return contents
