"""Checkable instructions: does a text keep every constraint of its prompt? In the manner of IFEval
(arXiv:2311.07911).

A ground truth is a JSON list of constraints, each a list of a kind and its arguments:
``[["first_word", "evening"], ["max_words", 12]]``. :data:`CHECKS` has the kinds. ``method`` says
what counts:

* ``naive``: every constraint is kept. A policy soon learns to repeat the requested word and nothing
  else.
* ``guarded`` (default): the text is also a text: it has :data:`MIN_OTHER_WORDS` different words
  beside the requested ones, and :data:`MIN_DISTINCT` of its words are different.

Either way ``followed`` is the share of constraints that are kept, ``distinct`` the share of
different words and ``naive`` whether all constraints are kept; none of them is part of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from reward_scores.score import Score, graded, no_answer

MIN_OTHER_WORDS = 3
MIN_DISTINCT = 0.7
METHODS = ("naive", "guarded")
# Letters, with apostrophes and hyphens inside
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_SENTENCE = re.compile(r"[.!?]+(?=\s|$|[\"\u201d])")
_ITEM = re.compile(r"- \S.*")

EXAMPLES = (
    ("Evening brings the stars out, one by one.", '[["first_word", "evening"]]', 1.0),
    ("Stars come out in the evening.", '[["first_word", "evening"]]', 0.0),
)


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without digits and punctuation."""
    return _WORD.findall(text.lower())


def _in_order(text: str, first: str, second: str) -> bool:
    words = words_of(text)
    return first in words and second in words and words.index(first) < words.index(second)


def _is_list(text: str, items: int) -> bool:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) == items and all(_ITEM.fullmatch(line) for line in lines)


def _is_quoted(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 2 and stripped[0] == stripped[-1] == '"'


# Kind -> (types of its arguments, whether a text keeps it). Words of arguments are in lower case.
CHECKS: dict[str, tuple[tuple[type, ...], Callable[..., bool]]] = {
    "lower_case": ((), lambda text: text == text.lower()),
    "upper_case": ((), lambda text: text == text.upper()),
    "first_word": ((str,), lambda text, word: words_of(text)[:1] == [word]),
    "last_word": ((str,), lambda text, word: words_of(text)[-1:] == [word]),
    "word_times": ((str, int), lambda text, word, times: words_of(text).count(word) >= times),
    "max_words": ((int,), lambda text, most: len(words_of(text)) <= most),
    "sentences": ((int,), lambda text, number: len(_SENTENCE.findall(text)) == number),
    "list_items": ((int,), _is_list),
    "in_quotes": ((), _is_quoted),
    "without": ((str,), lambda text, character: character not in text),
    "in_order": ((str, str), _in_order),
}


def read_constraints(ground_truth: Any) -> list[list[Any]]:
    """Return the constraints of a ground truth. Raises ValueError for any that :data:`CHECKS` does
    not have."""
    constraints = json.loads(ground_truth)
    if not isinstance(constraints, list) or not constraints:
        raise ValueError("must be a JSON list of at least one constraint")
    for constraint in constraints:
        kind, *arguments = constraint
        if kind not in CHECKS:
            raise ValueError(f"has the unknown kind {kind!r}; known: {', '.join(CHECKS)}")
        types = CHECKS[kind][0]
        if [type(argument) for argument in arguments] != list(types):
            needs = ", ".join(one.__name__ for one in types) or "none"
            raise ValueError(f"has {arguments!r} as arguments of {kind!r}, which takes: {needs}")
    return constraints


def check_ground_truth(ground_truth: Any, **options: Any) -> str | None:
    """Return what is wrong with a ground truth, or with the options; None where nothing is."""
    if (method := options.get("method", "guarded")) not in METHODS:
        return f"method={method!r} is none of {', '.join(METHODS)}"
    try:
        read_constraints(ground_truth)
    except (TypeError, ValueError) as error:
        return f"{error}; an example: {EXAMPLES[0][1]}"
    return None


def is_text(words: list[str], requested: set[str]) -> bool:
    """Return whether the words make a text rather than repetitions of what was requested."""
    others = set(words) - requested
    return len(others) >= MIN_OTHER_WORDS and len(set(words)) >= MIN_DISTINCT * len(words)


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: str = "guarded",
) -> Score:
    """Return 1 where the response keeps every constraint and, with ``method="guarded"``, is a text.

    Raises:
        ValueError: the ground truth has no constraints, or one of an unknown kind.
    """
    constraints = read_constraints(ground_truth)
    text = response.strip()
    words = words_of(response)
    if not words:
        return no_answer(followed=0.0, distinct=0.0, naive=0.0)
    kept = [CHECKS[kind][1](text, *arguments) for kind, *arguments in constraints]
    requested = {
        argument
        for _, *arguments in constraints
        for argument in arguments
        if isinstance(argument, str)
    }
    right = all(kept) and (method == "naive" or is_text(words, requested))
    parts = {
        "followed": sum(kept) / len(kept),
        "distinct": len(set(words)) / len(words),
        "naive": float(all(kept)),
    }
    return graded(right, pred=None, **parts)
