"""Open a retriever from its options, and check that index, corpus and encoder belong together.

Nothing is built here, except the scan of a corpus that belongs to a faiss file made elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.search_r1.index.controls import ControlRetriever
from recipes.search_r1.index.corpus import Corpus, read_json, scan
from recipes.search_r1.index.passages import (
    BACKENDS,
    CONTROLS,
    DENSE,
    RetrievalError,
    Retriever,
    RetrieverOptions,
)

BUILT = "index.json"  # {"backends": {name: settings}}; a dense one has its encoder's settings


def make_retriever(options: RetrieverOptions) -> Retriever:
    """Open an index folder or a faiss file."""
    if options.backend is not None and options.backend not in BACKENDS:
        raise RetrievalError(f"backend={options.backend!r}: must be one of {', '.join(BACKENDS)}")
    path = Path(options.index).expanduser()
    return _of_file(path, options) if path.is_file() else _of_folder(path, options)


def _of_folder(folder: Path, options: RetrieverOptions) -> Retriever:
    if not (folder / BUILT).is_file():
        raise RetrievalError(
            f"{folder}: no index is there; build one with python -m recipes.search_r1.index.cli"
        )
    built = read_json(folder / BUILT)
    corpus = Corpus(folder, Path(options.corpus).expanduser() if options.corpus else None)
    backend = options.backend or _only(built["backends"], folder)
    if backend in CONTROLS:
        return ControlRetriever(corpus, backend)
    if backend not in built["backends"]:
        has = ", ".join(built["backends"])
        raise RetrievalError(
            f"{folder}: it holds {has}; add --backend {backend} with recipes.search_r1.index.cli"
        )
    if built["backends"][backend]["corpus"] != corpus.hash:
        raise RetrievalError(f"{folder}: {backend} was built from another corpus; build it again")
    if backend == "bm25":
        from recipes.search_r1.index.bm25 import Bm25Retriever

        return Bm25Retriever(folder / "bm25", corpus, options.mmap)
    return _dense(
        folder / f"{backend}.faiss", corpus, built["backends"][backend]["encoder"], options
    )


def _of_file(path: Path, options: RetrieverOptions) -> Retriever:
    """Open a faiss file made elsewhere. Its corpus is scanned once, into a folder beside the
    file."""
    missing = [name for name in ("corpus", "encoder") if getattr(options, name) is None]
    if missing:
        raise RetrievalError(
            f"{path}: a faiss file needs {' and '.join(missing)} as well (--{' --'.join(missing)})"
        )
    folder = path.with_name(f"{path.name}.corpus")
    source = Path(options.corpus).expanduser()
    if not (folder / "corpus.json").exists():
        scan(source, folder)
    corpus = Corpus(folder, source)
    if options.backend in CONTROLS:
        return ControlRetriever(corpus, options.backend)
    retriever = _dense(path, corpus, {}, options)
    if options.backend not in (None, retriever.backend):
        raise RetrievalError(
            f"backend={options.backend}: {path} is {retriever.backend}; leave backend out"
        )
    return retriever


def _dense(
    path: Path, corpus: Corpus, built_with: dict[str, Any], options: RetrieverOptions
) -> Retriever:
    from recipes.search_r1.index.dense import DenseRetriever
    from recipes.search_r1.index.encoder import EncoderSettings, make_encoder, settings_of

    names = ("query_prefix", "passage_prefix", "pooling", "max_length")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if built_with:
        settings = EncoderSettings(
            **(built_with | given | ({"model": options.encoder} if options.encoder else {}))
        )
    else:
        settings = settings_of(str(options.encoder), **given)
    return DenseRetriever(
        path, corpus, make_encoder(settings, options.device, options.threads), options
    )


def _only(backends: dict[str, Any], folder: Path) -> str:
    if len(backends) != 1:
        several = (
            f"one of {', '.join(backends)}"
            if backends
            else (f"{DENSE[0]} or bm25, after building one")
        )
        raise RetrievalError(f"{folder}: say which back end (--backend): {several}")
    return next(iter(backends))
