"""Short answers without tags: the whole response is the answer. Exact match, or a gold answer
inside the response.

``reward_scores/qa_em.py`` reads answers in ``<answer>``; what is gold and how texts are normalised
is its. ``method`` says what counts:

* ``strict`` (default): the response is a gold answer, and nothing else.
* ``robust``: a gold answer stands in the response, as whole words. The lenient reading: it also
  accepts a response that repeats the whole passage, so that it measures and does not train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_scores import qa_em
from reward_scores.score import Score, graded, no_answer

METHODS = ("strict", "robust")
EXAMPLES = (
    ("The Eiffel Tower.", {"target": ["Eiffel Tower"]}, 1.0),
    ("59", {"target": ["59", "fifty-nine", "fifty nine"]}, 1.0),
    ("London", {"target": ["Paris"]}, 0.0),
)


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: str = "strict",
) -> Score:
    """Return 1 where the response is a gold answer, or with ``method="robust"`` holds one.

    ``ground_truth`` holds ``target``: a text or several. Raises ValueError for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"short_answer method={method!r}: must be one of {', '.join(METHODS)}")
    said = qa_em.normalize_answer(response)
    golds = qa_em.targets(ground_truth)
    if not response.strip():
        return no_answer()
    right = any(qa_em.is_gold(said, response, gold) for gold in golds)
    if method == "robust" and not right:
        normal = [qa_em.normalize_answer(gold) for gold in golds]
        right = any(gold and f" {gold} " in f" {said} " for gold in normal)
    return graded(right, said)


def check_ground_truth(ground_truth: Any, method: str = "strict", **options: Any) -> str | None:
    """Return what is wrong with a ground truth, or with the options; None where nothing is."""
    if method not in METHODS:
        return f"method={method!r} is none of {', '.join(METHODS)}"
    return qa_em.check_ground_truth(ground_truth)


note_ground_truth = qa_em.note_ground_truth
