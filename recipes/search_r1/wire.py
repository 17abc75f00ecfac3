"""Convert the retrieval server's answers to JSON and back: the server writes them and the client
reads them.

The format is Search-R1's published one, so that either side can be replaced by another program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from recipes.search_r1.index.passages import Passage, RetrievalError

IDENTITY = "x-index"  # header of our server's answers: corpus hash and fingerprint


def to_wire(found: Sequence[Sequence[Passage]], return_scores: bool) -> dict[str, Any]:
    """Return the published answer of ``POST /retrieve``; without scores the documents stand
    alone."""
    documents = [[{"id": p.id, "contents": p.contents} for p in passages] for passages in found]
    if not return_scores:
        return {"result": documents}
    scored = [
        [
            {"document": document, "score": passage.score}
            for document, passage in zip(row, passages, strict=True)
        ]
        for row, passages in zip(documents, found, strict=True)
    ]
    return {"result": scored}


def read_json(body: bytes | str) -> Any:
    """Return what a reply's JSON holds. Raises RetrievalError for all that the standard does not
    have, NaN included."""

    def refused(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(body, parse_constant=refused)
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"the reply is not JSON ({error}): {body[:80]!r}") from error


def from_wire(answer: Any, queries: int, topk: int) -> list[list[Passage]]:
    """Return the passages of a scored answer. Raises RetrievalError with the reason where it does
    not fit."""
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list):
        raise RetrievalError(f"the answer has no list 'result', it is {str(answer)[:80]!r}")
    if len(result) != queries:
        raise RetrievalError(f"the answer has {len(result)} results for {queries} queries")
    return [_passages(items, topk) for items in result]


def from_kept(text: Any, topk: int) -> list[Passage]:
    """Return the passages of a text that the cache keeps. Raises RetrievalError where it is
    none."""
    kept = read_json(text if isinstance(text, (str, bytes)) else b"")
    scored = (
        [{"document": one, "score": one.get("score")} for one in kept] if _is_rows(kept) else kept
    )
    return _passages(scored, topk)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _passages(items: Any, topk: int) -> list[Passage]:
    if not isinstance(items, list) or len(items) > topk:
        has = f"{len(items)} passages" if isinstance(items, list) else type(items).__name__
        raise RetrievalError(f"a result has {has}, asked for were at most {topk}")
    try:
        return [
            Passage(
                str(item["document"].get("id", "")),
                _text(item["document"]["contents"]),
                _score(item["score"]),
            )
            for item in items
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RetrievalError(
            f"a passage is not {{document: {{id, contents}}, score}} ({error!r})"
        ) from error


def _text(contents: Any) -> str:
    if not isinstance(contents, str):
        raise TypeError(f"contents is a {type(contents).__name__}")
    return contents


def _score(value: Any) -> float:
    score = float(value)  # servers in other languages write numbers as text too
    if not math.isfinite(score):
        raise ValueError(f"score is {value!r}, which is no number")
    return score
