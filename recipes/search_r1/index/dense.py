"""Dense retrieval with faiss: exact search (flat), HNSW graphs (arXiv 1603.09320) and inverted
lists (IVF).

Vectors have unit length and are compared by inner product. ``vectors.f32`` holds them row by row
and is shared by the three; it is written in chunks, and an interrupted pass goes on at the last
whole one. A published index, a faiss file made elsewhere over the same corpus, is searched the same
way.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from core.files import replacing
from recipes.search_r1.index.corpus import Corpus, Progress, no_progress, read_json, write_json
from recipes.search_r1.index.encoder import Encoder, weights_hash
from recipes.search_r1.index.passages import (
    Passage,
    RetrievalError,
    RetrieverOptions,
    fingerprint,
    id_order,
)

VECTORS = "vectors.f32"
ABOUT = "vectors.json"
CHUNK = 1024  # passages encoded between two notes of how far it went
ADD = 65_536  # vectors given to faiss at a time
HNSW_LINKS, HNSW_BUILD = 64, 200  # M of the published HNSW64; candidates while building
ROUNDING = 1e-5  # between two float32 sums of the same product of unit vectors; 1e-7 is usual
# Cosine between a stored vector and the same passage encoded anew; half precision costs 1e-3
AGREE = 0.99


def encode_corpus(
    corpus: Corpus, encoder: Encoder, folder: Path, progress: Progress = no_progress
) -> np.ndarray:
    """Return the vectors of the whole corpus: those in ``folder/vectors.f32``, to which missing
    ones are added.

    Shapes: [rows, dim], float32, memory-mapped. Raises RetrievalError where the file is another
    encoder's.
    """
    about = {
        "corpus": corpus.hash,
        "encoder": encoder.settings.as_dict(),
        "weights": weights_hash(encoder.settings.model),
        "dtype": encoder.dtype,
        "shape": [len(corpus), encoder.dim],
    }
    done, seconds = _encoded(folder, about)
    progress(done)
    with open(folder / VECTORS, "ab") as file:
        file.truncate(done * encoder.dim * 4)
        began = time.perf_counter() - seconds
        for start in range(done, len(corpus), CHUNK):
            stop = min(start + CHUNK, len(corpus))
            file.write(
                encoder.encode(
                    list(corpus.contents(start, stop)), encoder.settings.passage_prefix
                ).tobytes()
            )
            file.flush()
            os.fsync(file.fileno())
            write_json(
                folder / ABOUT, about | {"rows": stop, "seconds": time.perf_counter() - began}
            )
            progress(stop - start)
    return np.memmap(folder / VECTORS, np.float32, "r", shape=(len(corpus), encoder.dim))


def _encoded(folder: Path, about: dict[str, Any]) -> tuple[int, float]:
    """Return how many rows are whole already, and the seconds they took."""
    if not (folder / ABOUT).exists():
        return 0, 0.0
    found = read_json(folder / ABOUT)
    rows = found.pop("rows")
    seconds = found.pop("seconds")
    if found != about:
        differs = [name for name in about if found.get(name) != about[name]]
        raise RetrievalError(
            f"{folder / VECTORS}: made with another {', '.join(differs)}; use another --index "
            f"folder, or remove it"
        )
    return rows, seconds


def build_faiss(
    backend: str,
    vectors: np.ndarray,
    path: Path,
    lists: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Build ``flat``, ``hnsw`` or ``ivf``, write it to ``path``, and return its settings.

    ``lists`` is the number of inverted lists; None means four times the root of the rows.
    """
    import faiss

    rows, dim = vectors.shape
    settings: dict[str, Any] = {}
    if backend == "flat":
        index = faiss.IndexFlatIP(dim)
    elif backend == "hnsw":
        index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILD
        settings = {"links": HNSW_LINKS, "ef_construction": HNSW_BUILD}
    else:
        settings = {"lists": lists or max(1, min(rows // 39, int(4 * rows**0.5)))}
        index = faiss.index_factory(dim, f"IVF{settings['lists']},Flat", faiss.METRIC_INNER_PRODUCT)
        sample = np.sort(np.random.default_rng(1).permutation(rows)[: 256 * settings["lists"]])
        index.train(np.ascontiguousarray(vectors[sample]))
    for start in range(0, rows, ADD):
        index.add(np.ascontiguousarray(vectors[start : start + ADD]))
        progress(min(ADD, rows - start))
    if index.ntotal != rows:
        raise RetrievalError(
            f"{path}: faiss holds {index.ntotal} of {rows} vectors; build it again"
        )
    with replacing(path) as partial:
        faiss.write_index(index, str(partial))
    return settings


class DenseRetriever:
    """A retriever that encodes the queries and searches a faiss index.

    Among passages of equal score a flat index finds those whose ids come first.
    Raises RetrievalError where rows, dimensions or (``check_encoder``) the vectors of a few
    passages do not agree.
    """

    def __init__(self, path: Path, corpus: Corpus, encoder: Encoder, options: RetrieverOptions):
        self._index, self.backend = _opened(path, options.mmap)
        self._threads = options.threads
        self._corpus = corpus
        self._encoder = encoder
        if self._index.ntotal != len(corpus):
            raise RetrievalError(
                f"{path}: {self._index.ntotal} vectors, the corpus has "
                f"{len(corpus)} rows: not a pair"
            )
        if self._index.d != encoder.dim:
            raise RetrievalError(
                f"{path}: vectors of {self._index.d} numbers, encoder {encoder.settings.model} "
                f"makes {encoder.dim}"
            )
        settings = self._set_search(options.ef_search, options.nprobe)
        if options.check_encoder:
            self._check_encoder(path)
        if self.backend == "flat" and options.gpu and _gpus():
            self._index = _on_gpus(self._index)
            settings = {"dtype": "float16"}
        on_cpu = self.backend == "flat" and not settings
        # A view, which stays on disk where it is mapped
        self._vectors = _vectors(self._index) if on_cpu else None
        self.corpus_hash = corpus.hash
        encoded_by = encoder.settings.as_dict(), weights_hash(encoder.settings.model)
        self.fingerprint = fingerprint(self.backend, corpus.hash, *encoded_by, settings)

    def __len__(self) -> int:
        return len(self._corpus)

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        search = self._search_flat if self.backend == "flat" else self.search
        scores_NK, rows_NK = search(
            self._encoder.encode(queries, self._encoder.settings.query_prefix), topk
        )
        return [
            self._found(rows, scores)[:topk]
            for rows, scores in zip(rows_NK, scores_NK, strict=True)
        ]

    def search(self, vectors_ND: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inner products and rows, best first; -1 where faiss found fewer. Shapes: [N, topk]
        both."""
        import faiss

        if self._threads:
            # Of the thread that calls it, and a server searches in another
            faiss.omp_set_num_threads(self._threads)
        return self._index.search(vectors_ND, topk)

    def _search_flat(self, vectors_ND: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``search`` of so many that none outside can be as good as the ``topk``-th, with
        scores anew.

        The sums of a matrix product depend on how many queries, threads and rows share it, in the
        last bits. What is found must not, so everything within ROUNDING of the last place is found,
        and its scores are sums in float64.
        """
        width = topk + 1
        while True:
            scores_NK, rows_NK = self.search(vectors_ND, min(width, len(self)))
            if width >= len(self) or (scores_NK[:, -1] < scores_NK[:, topk - 1] - ROUNDING).all():
                break
            width *= 2
        if self._vectors is not None:
            for vector, scores, rows in zip(vectors_ND, scores_NK, rows_NK, strict=True):
                scores[:] = self._vectors[rows].astype(np.float64) @ vector.astype(np.float64)
        return scores_NK, rows_NK

    def _found(self, rows: np.ndarray, scores: np.ndarray) -> list[Passage]:
        real = rows >= 0
        found = self._corpus.passages(rows[real], scores[real])
        return sorted(found, key=id_order) if self.backend == "flat" else found

    def _set_search(self, ef_search: int, nprobe: int) -> dict[str, int]:
        if self.backend == "hnsw":
            self._index.hnsw.efSearch = ef_search
            return {"ef_search": ef_search}
        if self.backend == "ivf":
            self._index.nprobe = min(nprobe, self._index.nlist)
            return {"nprobe": self._index.nprobe}
        return {}

    def _check_encoder(self, path: Path) -> None:
        """Encode the first, middle and last passage anew. Raises RetrievalError where the file's
        vectors differ."""
        rows = sorted({0, len(self) // 2, len(self) - 1})
        texts = [self._corpus.row(row)["contents"] for row in rows]
        fresh = self._encoder.encode(texts, self._encoder.settings.passage_prefix)
        for row, vector in zip(rows, fresh, strict=True):
            alike = self._likeness(row, vector)
            if alike < AGREE:
                raise RetrievalError(
                    f"{path}: row {row} of the corpus, encoded by {self._encoder.settings.model}, "
                    f"has cosine "
                    f"{alike:.3f} with the index's vector, at least {AGREE} is wanted: another "
                    f"corpus, encoder, prefix "
                    "or pooling; give the ones the index was made with"
                )

    def _likeness(self, row: int, vector: np.ndarray) -> float:
        if self.backend != "ivf":
            stored = self._index.reconstruct(row)
            return float(stored @ vector / max(float(np.linalg.norm(stored)), 1e-9))
        # Inverted lists cannot return the vector of a row
        scores, _ = self._index.search(vector[None], 1)
        return float(scores[0, 0])


def _opened(path: Path, mmap: bool) -> tuple[Any, str]:
    """Open the index; returns it and its kind. What faiss cannot map (HNSW graphs of old files) is
    read into memory."""
    import faiss

    if not path.is_file():
        raise RetrievalError(
            f"{path}: there is no such index; build it with python -m recipes.search_r1.index.cli"
        )
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
    except RuntimeError as error:
        raise RetrievalError(
            f"{path}: faiss cannot read it ({error}); build or download it again"
        ) from error
    kinds: list[tuple[type, str]] = [
        (faiss.IndexFlat, "flat"),
        (faiss.IndexHNSW, "hnsw"),
        (faiss.IndexIVF, "ivf"),
    ]
    for kind, name in kinds:
        if isinstance(index, kind):
            return index, name
    raise RetrievalError(
        f"{path}: a {type(index).__name__}; flat, HNSW and IVF indices can be searched"
    )


def _gpus() -> int:
    """Return the GPUs that faiss finds; its build for CPUs finds none."""
    import faiss

    return faiss.get_num_gpus() if hasattr(faiss, "index_cpu_to_all_gpus") else 0


def _on_gpus(index: Any) -> Any:
    """Copy a flat index to all GPUs, a part to each, in half precision: 32 GB for the published
    index."""
    import faiss

    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = True
    return faiss.index_cpu_to_all_gpus(index, co=options)


def _vectors(index: Any) -> np.ndarray:
    """Return a view of the vectors of a flat index."""
    import faiss

    return faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
