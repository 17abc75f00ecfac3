"""Open questions with short answers in ``<answer>``: exact match, substring match, or word overlap.

``em`` and ``subem`` are verl's ``search_r1_like_qa_em``, on the response alone; with ``min_answers=2`` and
``max_tags=None`` they are Search-R1's ``qa_em``, which reads prompt and response and relies on the example in the
prompt (on the response alone that is ``max_tags=None``). ``f1`` is SQuAD's.
The published variants have no guard for a gold answer that normalises to nothing (``the``): with ``subem`` it is
part of every answer. ``robust`` is ``em`` in which such a gold never matches.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reward_scores.score import Score, graded, no_answer
from reward_scores.tags import between

METHODS = ("em", "subem", "f1", "robust")
EXAMPLES = (
    ("<think>the capital</think> <answer>Paris</answer>", {"target": ["Paris", "Paris, France"]}, 1.0),
    ("<answer> The Paris. </answer>", {"target": "paris"}, 1.0),
    ("<answer>Paris</answer> no: <answer>London</answer>", {"target": ["Paris"]}, 0.0),
    ("Paris", {"target": ["Paris"]}, 0.0),
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "em",
    format_score: float = 0.0,
    correct_score: float = 1.0,
    min_answers: int = 1,
    max_tags: int | None = 10,
) -> Score:
    """Return ``correct_score`` for a gold answer, ``format_score`` for another one, 0 where there is none.

    With ``em``, a right answer among more than ``max_tags`` opening or closing tags counts a quarter.

    ``ground_truth`` holds ``target``: a text or several. With ``f1`` the value is the best overlap with a gold
    answer, and ``acc`` is still the exact match.
    """
    if method not in METHODS:
        raise ValueError(f"qa_em method={method!r}: must be one of {', '.join(METHODS)}")
    answer = extract(response, min_answers)
    if answer is None:
        return no_answer()
    said, golds = normalize_answer(answer), [_normal_gold(gold) for gold in targets(ground_truth)]
    if method == "f1":
        best = max((_overlap(said, gold) for gold in golds), default=0.0)
        return graded(said in golds, said, best * correct_score, f1=best)
    if method == "robust":
        golds = [gold for gold in golds if gold]
    right = any(gold in said for gold in golds) if method == "subem" else said in golds
    if not right:
        return graded(False, said, format_score)
    tags = max(response.count("<answer>"), response.count("</answer>"))
    spam = method == "em" and max_tags is not None and tags > max_tags
    return graded(True, said, correct_score / 4 if spam else correct_score)


def targets(ground_truth: Any) -> Sequence[str]:
    golds = ground_truth["target"]
    return [golds] if isinstance(golds, str) else [str(gold) for gold in golds]


def extract(text: str, min_answers: int = 1) -> str | None:
    """Return the content of the last ``<answer>``; None with fewer than ``min_answers`` of them."""
    found = between(text, "answer")
    return found[-1].strip() if found and len(found) >= min_answers else None


def normalize_answer(text: str) -> str:
    """Return lower case without ASCII punctuation and articles, with single spaces (SQuAD, in this order)."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


@functools.lru_cache(maxsize=65536)  # a group of answers asks for the same golds
def _normal_gold(gold: str) -> str:
    return normalize_answer(gold)


def _overlap(said: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over words; 0 where one of the two has none."""
    words, wanted = Counter(said.split()), Counter(gold.split())
    shared = sum((words & wanted).values())
    return 2 * shared / (words.total() + wanted.total()) if shared else 0.0


def check_ground_truth(ground_truth: Any, method: str = "em", **options: Any) -> str | None:
    if not isinstance(ground_truth, Mapping) or "target" not in ground_truth:
        return f"must hold target, got {ground_truth!r:.200}"
    golds = [] if ground_truth["target"] is None else targets(ground_truth)
    if len(golds) == 0:
        return "target holds no gold answer"
    empty = [gold for gold in golds if not normalize_answer(gold)]
    if empty and method == "subem":
        return f"{empty!r:.200} normalises to nothing, which is part of every answer; use another method"
    return None
