"""BM25 (Robertson and Zaragoza 2009) by Lucene's formula, with bm25s: scores are computed when the
index is built, so a query adds up a few columns of a matrix that stays on disk.

Defaults are those of the published Lucene index: k1=0.9, b=0.4, English stop words, Porter's
stemmer. Building is two passes: texts to numbers of stems (``stems.u32``, in chunks; an interrupted
pass goes on at the last whole chunk), then the matrix, which takes about 45 bytes of memory for
every different word of every passage.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes.search_r1.index.corpus import Corpus, Progress, no_progress, read_json, write_json
from recipes.search_r1.index.passages import Passage, RetrievalError, fingerprint

K1 = 0.9
B = 0.4
CHUNK = 20_000  # passages
_WORD = re.compile(r"\w+")
_POSSESSIVE = re.compile(r"['\u2019]s\b")


class Stems:
    """A table from words to numbers of stems. ``grow``: a new stem gets the next number; otherwise
    it is left out."""

    def __init__(self, stems: dict[str, int], grow: bool):
        import Stemmer
        from bm25s.stopwords import STOPWORDS_EN

        self.numbers = stems
        self._stem = Stemmer.Stemmer("english").stemWord
        self._grow = grow
        # Word -> number, -1: left out
        self._known: dict[str, int] = dict.fromkeys(STOPWORDS_EN, -1)

    def __call__(self, text: str) -> list[int]:
        known = self._known
        numbers = []
        for word in _WORD.findall(_POSSESSIVE.sub("", text.lower())):
            number = known.get(word)
            if number is None:
                number = self._number(word)
            if number >= 0:
                numbers.append(number)
        return numbers

    def _number(self, word: str) -> int:
        stem = self._stem(word)
        number = self.numbers.get(stem, -1)
        if number < 0 and self._grow:
            number = self.numbers[stem] = len(self.numbers)
        # A query may hold any text: what it leaves here is bounded
        if len(self._known) < 1_000_000:
            self._known[word] = number
        return number


def build_bm25(
    corpus: Corpus, folder: Path, progress: Callable[[str, int], Any] | None = None
) -> dict[str, Any]:
    """Build the index in ``folder`` and return its settings. It goes on where an earlier attempt
    stopped."""
    import bm25s

    folder.mkdir(parents=True, exist_ok=True)
    texts = _TokenFile(folder, corpus.hash)
    texts.fill(corpus, progress("reading", len(corpus)) if progress else no_progress)
    index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
    documents = texts.documents(
        progress("counting, scoring", 3 * len(corpus)) if progress else no_progress
    )
    index.scores = index.build_index_from_ids(
        list(range(len(texts.stems))), documents, show_progress=False
    )
    index.vocab_dict = texts.stems
    index.save(folder, show_progress=False)
    texts.remove()
    return {"k1": K1, "b": B, "stems": len(texts.stems)}


class Bm25Retriever:
    """A retriever over a BM25 index. Passages that share no stem with the query are not found."""

    backend = "bm25"

    def __init__(self, folder: Path, corpus: Corpus, mmap: bool):
        import bm25s

        index = bm25s.BM25.load(folder, mmap=mmap, load_corpus=False)
        scores = index.scores
        if scores["num_docs"] != len(corpus):
            raise RetrievalError(
                f"{folder}: {scores['num_docs']} rows, the corpus has {len(corpus)}; build it again"
            )
        # np.asarray of a memory map is the same memory without the slow class
        self._data, self._rows, self._starts = (
            np.asarray(scores[name]) for name in ("data", "indices", "indptr")
        )
        self._stems = Stems(index.vocab_dict, grow=False)
        self._corpus = corpus
        self.corpus_hash = corpus.hash
        self.fingerprint = fingerprint(
            self.backend, corpus.hash, index.k1, index.b, len(index.vocab_dict)
        )

    def __len__(self) -> int:
        return len(self._corpus)

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Passage]:
        scores = np.zeros(len(self), np.float32)
        for stem in self._stems(query):
            column = slice(self._starts[stem], self._starts[stem + 1])
            scores[self._rows[column]] += self._data[column]  # a row stands in a column once
        rows = best_rows(scores, topk)
        return self._corpus.passages(rows, scores[rows])


def best_rows(scores_N: np.ndarray, topk: int) -> np.ndarray:
    """Return the rows of the ``topk`` largest positive scores, best first, and the earlier row
    first where equal."""
    rows = np.flatnonzero(scores_N > 0)
    if topk < len(rows):
        least = np.partition(scores_N[rows], len(rows) - topk)[len(rows) - topk]
        rows = rows[scores_N[rows] >= least]
    return rows[np.lexsort((rows, -scores_N[rows]))][:topk]


class _TokenFile:
    """The corpus as numbers of stems, in three files that only ever grow, and how much of them is
    whole."""

    def __init__(self, folder: Path, corpus_hash: str):
        self._progress = folder / "reading.json"
        self._files = {name: folder / f"reading.{name}" for name in ("stems", "lengths", "words")}
        self._corpus_hash = corpus_hash
        self.stems: dict[str, int] = {}

    def fill(self, corpus: Corpus, progress: Progress) -> None:
        done = self._resume()
        progress(done["rows"])
        stems = Stems(self.stems, grow=True)
        for start in range(done["rows"], len(corpus), CHUNK):
            stop = min(start + CHUNK, len(corpus))
            known = len(self.stems)
            texts = [stems(text) for text in corpus.contents(start, stop)]
            words = list(itertools.islice(self.stems, known, None))
            self._append(
                "stems", np.fromiter(itertools.chain.from_iterable(texts), np.uint32).tobytes()
            )
            self._append("lengths", np.array([len(text) for text in texts], np.uint32).tobytes())
            self._append("words", "".join(json.dumps(word) + "\n" for word in words).encode())
            sizes = {name: path.stat().st_size for name, path in self._files.items()}
            write_json(self._progress, {"corpus": self._corpus_hash, "rows": stop, "sizes": sizes})
            progress(stop - start)

    def documents(self, progress: Progress) -> _Documents:
        return _Documents(self._files["stems"], self._files["lengths"], progress)

    def remove(self) -> None:
        for path in (self._progress, *self._files.values()):
            path.unlink()

    def _append(self, name: str, data: bytes) -> None:
        with open(self._files[name], "ab") as file:
            file.write(data)

    def _resume(self) -> dict[str, Any]:
        done = read_json(self._progress) if self._progress.exists() else None
        if done is None or done["corpus"] != self._corpus_hash:
            done = {"rows": 0, "sizes": dict.fromkeys(self._files, 0)}
        for name, path in self._files.items():  # what a half-written chunk left is cut off
            with open(path, "ab") as file:
                file.truncate(done["sizes"][name])
        with open(self._files["words"], encoding="utf-8") as lines:
            self.stems = {json.loads(line): number for number, line in enumerate(lines)}
        return done


class _Documents:
    """The passages' stems, one list at a time: bm25s iterates over them three times."""

    def __init__(self, stems: Path, lengths: Path, progress: Progress):
        self._stems = stems
        self._progress = progress
        self._lengths = np.fromfile(lengths, np.uint32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[int]]:
        with open(self._stems, "rb") as file:
            for length in self._lengths:
                self._progress(1)
                yield np.fromfile(file, np.uint32, int(length)).tolist()
