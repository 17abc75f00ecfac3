"""A cross-encoder that orders the first passages anew (``cross-encoder/ms-marco-MiniLM-L12-v2``, for example).

It wraps any retriever, whose scores its own replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from core.data.vocabulary import writable
from recipes.search_r1.index.passages import Passage, RetrievalError, Retriever, fingerprint

Rate = Callable[[Sequence[tuple[str, str]]], Sequence[float]]  # (query, contents) pairs -> relevance
MAX_LENGTH, BATCH = 512, 32


class RerankingRetriever:
    """Another retriever's first ``candidates`` passages of a query, ordered by ``rate``."""

    def __init__(self, inner: Retriever, rate: Rate, name: str, candidates: int):
        if candidates < 1:
            raise RetrievalError(f"rerank_from={candidates}: must be at least 1")
        self._inner, self._rate, self._candidates = inner, rate, candidates
        self.corpus_hash = inner.corpus_hash
        self.backend = f"{inner.backend}+rerank"
        self.fingerprint = fingerprint(inner.fingerprint, name, candidates)

    def __len__(self) -> int:
        return len(self._inner)

    def retrieve(self, queries: list[str], topk: int) -> list[list[Passage]]:
        found = self._inner.retrieve(queries, max(topk, self._candidates))
        pairs = [(query, p.contents) for query, passages in zip(queries, found, strict=True) for p in passages]
        scores = iter(self._rate(pairs) if pairs else ())
        rated = [[replace(passage, score=float(next(scores))) for passage in passages] for passages in found]
        return [sorted(passages, key=lambda passage: -passage.score)[:topk] for passages in rated]


def cross_encoder(model: str, device: str = "cpu") -> Rate:
    """Return the rating by a sequence-classification model with one logit. Raises RetrievalError where it has more."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForSequenceClassification.from_pretrained(model).to(device).eval()
    except (OSError, ValueError) as error:
        raise RetrievalError(f"rerank={model}: it cannot be loaded ({error}); give a folder or a hub id") from error
    if network.config.num_labels != 1:
        raise RetrievalError(
            f"rerank={model}: it has {network.config.num_labels} logits; a cross-encoder with one is needed"
        )

    def rate(pairs: Sequence[tuple[str, str]]) -> list[float]:
        scores: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(pairs), BATCH):
                queries, texts = zip(*pairs[start : start + BATCH], strict=True)
                batch = tokenizer(
                    list(map(writable, queries)),
                    list(map(writable, texts)),
                    truncation="longest_first",
                    max_length=MAX_LENGTH,
                    padding=True,
                    return_tensors="pt",
                ).to(device)
                scores += network(**batch).logits[:, 0].float().tolist()
        return scores

    return rate
