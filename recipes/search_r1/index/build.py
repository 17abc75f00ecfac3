"""Build an index folder from a corpus. A second call goes on where the first stopped and keeps what
is finished.

The command line is ``cli.py``; opening a finished folder to search it is ``opening.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.search_r1.index.corpus import (
    ABOUT,
    Corpus,
    Progress,
    no_progress,
    read_json,
    scan,
    write_json,
)
from recipes.search_r1.index.opening import BUILT
from recipes.search_r1.index.passages import DENSE, RetrievalError

# (what begins, how many rows it has) -> called with rows done
Report = Callable[[str, int], Progress]


def silent(_: str, __: int) -> Progress:
    return no_progress


def build_index(
    corpus: str | Path,
    folder: str | Path,
    backends: Sequence[str] = ("bm25",),
    encoder: Any = None,
    lists: int | None = None,
    report: Report = silent,
) -> dict[str, Any]:
    """Build the named back ends in ``folder`` and return the content of ``index.json``.

    ``encoder`` is an ``Encoder``, for flat, hnsw and ivf. ``lists`` are the inverted lists of ivf.
    Raises RetrievalError for a bad corpus line, and where the folder holds another corpus or
    encoder.
    """
    source = Path(corpus).expanduser()
    folder = Path(folder).expanduser()
    unknown = set(backends) - {"bm25", *DENSE}
    if unknown:
        raise RetrievalError(
            f"backend {', '.join(sorted(unknown))}: bm25, {', '.join(DENSE)} can be built"
        )
    if encoder is None and set(backends) & set(DENSE):
        raise RetrievalError("a dense index needs an encoder (--encoder)")
    if not (folder / ABOUT).exists():
        scan(source, folder, report("checking the corpus", 0))
    passages = Corpus(folder, source)
    built = read_json(folder / BUILT) if (folder / BUILT).exists() else {"backends": {}}
    for backend in backends:
        origin = {"corpus": passages.hash}
        if backend != "bm25":
            origin["encoder"] = encoder.settings.as_dict()
        if origin.items() <= built["backends"].get(backend, {}).items():
            continue
        settings = _build(backend, passages, folder, encoder, lists, report)
        built["backends"][backend] = origin | settings
        write_json(folder / BUILT, built)
    return built


def _build(
    backend: str, corpus: Corpus, folder: Path, encoder: Any, lists: int | None, report: Report
) -> dict[str, Any]:
    """Build one back end. Returns its settings and seconds, less those of encoding, which
    ``vectors.json`` holds."""
    began = time.perf_counter()
    if backend == "bm25":
        from recipes.search_r1.index.bm25 import build_bm25

        settings = build_bm25(corpus, folder / "bm25", report)
    else:
        from recipes.search_r1.index.dense import build_faiss, encode_corpus

        vectors = encode_corpus(corpus, encoder, folder, report("encoding", len(corpus)))
        began = time.perf_counter()
        progress = report(f"building {backend}", len(corpus))
        settings = build_faiss(backend, vectors, folder / f"{backend}.faiss", lists, progress)
    return settings | {"seconds": round(time.perf_counter() - began, 2)}
