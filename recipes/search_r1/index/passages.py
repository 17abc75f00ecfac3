"""Passages, and what finds them: the types that indices, server and client share.

A corpus is a file of ``{"id", "contents"}`` lines; the first line of ``contents`` is the title, as
in Search-R1. ``python -m recipes.search_r1.index.cli`` makes an index folder from it,
``opening.make_retriever`` opens one, and ``retrieval_server`` puts one behind HTTP. All are a
:class:`Retriever`, so that the lab needs no server.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

DENSE = ("flat", "hnsw", "ivf")
CONTROLS = ("random", "empty")
BACKENDS = ("bm25", *DENSE, *CONTROLS)
QUERY_CHARS = 4096  # the client cuts a longer query instead of failing: the policy writes it


class RetrievalError(RuntimeError):
    """A search cannot be answered: an index does not fit, or a server fails."""


@dataclass(frozen=True)
class Passage:
    """One passage found. ``score`` grows with relevance: BM25, an inner product, or a
    cross-encoder's logit."""

    id: str
    contents: str
    score: float


class Retriever(Protocol):
    """``corpus_hash`` names the passages; ``fingerprint`` names passages, index and settings
    together, so equal fingerprints answer equally."""

    corpus_hash: str
    fingerprint: str
    backend: str

    def __len__(self) -> int: ...

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return at most ``topk`` passages for every query, best first. Dense indices always find
        ``topk``; BM25 finds fewer, or none, where fewer share a word with the query."""
        ...


@dataclass(frozen=True)
class RetrieverOptions:
    """Which index to open, and with what.

    ``index`` is a folder that ``build_index`` made, or a faiss file (the published ones), which
    then needs ``corpus`` and ``encoder``.
    """

    index: str | Path
    corpus: str | Path | None = None  # the JSON lines; by default those of which the folder is made
    # One of BACKENDS; by default the only one that the folder holds. ``random`` and ``empty`` are
    # controls: passages that have nothing to do with the query, and none.
    backend: str | None = None
    # Folder or hub id; by default what the folder was built with. So are the four below it, which
    # for a faiss file are E5's.
    encoder: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    pooling: str | None = None  # mean or cls
    max_length: int | None = None  # tokens
    device: str = "cpu"  # of the encoder
    mmap: bool = True  # leave on disk what can be read from there
    threads: int | None = None  # of faiss and of torch on the CPU; None is their own default
    ef_search: int = 128  # HNSW's candidates of a query
    nprobe: int = 32  # IVF's lists that a query looks at
    # Search a flat index on the GPUs that faiss finds, in half precision and split over them
    gpu: bool = True
    check_encoder: bool = True  # encode a few passages at start and compare them with the index


def id_order(passage: Passage) -> tuple[float, int, str]:
    """Return what orders passages: the score, and among equal scores the id, numbers by their
    size."""
    return -passage.score, len(passage.id), passage.id


def fingerprint(*parts: Any) -> str:
    """Return 16 hexadecimal digits of everything that decides an answer."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
