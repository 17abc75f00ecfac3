"""Tasks of the lab: an optional chain, then ``#`` and a letter or digit: where hops lead, what a
figure shows.

The chain earns nothing by itself. ``recipes/lab/hops.py`` and ``recipes/lab/figures.py`` make the
questions. In ``recipes/lab/guesses.py``, whose answers are graded alike, the chain is the guesses
before the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_scores.score import Score, as_text, graded, no_answer

EXAMPLES = (
    ("abcd#d", "d", 1.0),
    ("#d", "d", 1.0),
    ("#a #d\n", "d", 1.0),
    ("abcd#a", "d", 0.0),
    ("abcd", "d", 0.0),
)


def score(response: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None) -> Score:
    """Return 1 where the text after the last ``#`` is the gold sign. ``chain`` is 1 where a path
    stands before it."""
    path, mark, answer = response.rpartition("#")
    answer = answer.strip()
    chain = float(bool(path.strip()))
    if not mark or not answer:
        return no_answer(chain=chain)
    return graded(answer == as_text(ground_truth), answer, chain=chain)


def check_ground_truth(ground_truth: Any) -> str | None:
    text = as_text(ground_truth)
    if isinstance(text, str) and len(text) == 1 and text.isalnum():
        return None
    return f"must be one letter or digit, got {ground_truth!r}"
