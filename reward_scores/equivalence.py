"""Decide whether two written answers are the same, for the ``robust`` variants of the mathematics scorers.

Equality by algebra, which may not end, is :mod:`reward_scores.symbolic`.
"""

from __future__ import annotations

import re
import unicodedata

from reward_scores.expressions import same_value
from reward_scores.latex import EXACT, NotLatex, to_text

MAX_CHARS = 2000  # longer answers are compared as they stand
MAX_DEPTH = 5  # of tuples within tuples
MAX_UNORDERED = 20  # elements of a set that are matched in any order
_OPEN, _CLOSE = "([{", ")]}"
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|(?<!\\)\\[!,;: ]|\{,\}(?=\d{3})|[$`~]|\*\*|\\\\$"
)
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:\\(?:text|mbox|mathrm|textrm)\{[^{}\d]*\}(?:\^\{?[23]\}?)?|\\?%|\^\{?\\circ\}?|\\degree|\u00b0)\s*$"
)
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|operatorname)\{([^{}]*)\}")


def equivalent(one: str, other: str) -> bool:
    """Return whether two answers are equal as text, numbers, formulas, or part by part as tuples or sets.

    Ignores layout, currency, units behind a number, separators of thousands, and ``x =`` in front. What is nothing
    after that equals nothing.
    """
    one, other = cleaned(one), cleaned(other)
    if not one or not other or max(len(one), len(other)) > MAX_CHARS:
        return one == other != ""
    return _same(one, other, 0)


def cleaned(answer: str) -> str:
    """Return the answer without layout, currency, units and words that do not change its value."""
    if len(answer) > MAX_CHARS:
        return answer.strip()
    text = unicodedata.normalize("NFKC", answer).replace("\u2212", "-")
    text = text.replace("\\$", "").replace("\\\\%", "\\%")
    text = _LAYOUT.sub(lambda found: " " if found[0].endswith(" ") else "", text).strip()
    while text.endswith(".") and text.rstrip(".").rstrip():
        text = text[:-1].rstrip()
    if not re.search(r"\\(?:sin|cos|tan)", text):  # an angle's degrees are no unit to drop
        text = _UNIT.sub("", text)
    text = re.sub(r"^[a-zA-Z]\w{0,3}(?:\([a-zA-Z]\))?\s*=(?!.*=)\s*", "", text)
    return " ".join(text.split())


def _same(one: str, other: str, depth: int) -> bool:
    if one.replace(" ", "") == other.replace(" ", ""):
        return True
    first, second = _parts(one), _parts(other)
    if first is not None or second is not None:
        return first is not None and second is not None and depth < MAX_DEPTH and _same_parts(first, second, depth + 1)
    if _plain_words(one).casefold() == _plain_words(other).casefold():
        return True
    return _same_formula(one, other)


def _plain_words(text: str) -> str:
    return _WORDS.sub(r"\1", text).replace(" ", "")


def _same_formula(one: str, other: str) -> bool:
    if "\\text" in one or "\\text" in other:  # words are no formula
        return False
    try:
        return same_value(*(to_text(_without_separators(_mixed(side)), EXACT) for side in (one, other)))
    except NotLatex:
        return False


def _without_separators(text: str) -> str:
    return re.sub(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", lambda found: found[0].replace(",", ""), text)


def _mixed(text: str) -> str:
    """Rewrite mixed numbers as sums: ``2\\frac{1}{2}`` is two and a half."""
    return re.sub(r"(?<![\d.^{])(\d+)\s*(\\[dt]?frac\{\d+\}\{\d+\}|\\[dt]?frac\d\d|(?<= )\d+/\d+)", r"(\1+\2)", text)


def _parts(text: str) -> tuple[str, list[str], str] | None:
    """Return brackets and elements of a tuple, interval or set; None for anything else."""
    text = text.replace("\\{", "{").replace("\\}", "}") if text.startswith("\\{") else text
    if text[:1] in _OPEN and text[-1:] in _CLOSE and text[:1]:
        inner = text[1:-1]
        elements = _split(inner)
        if elements is not None and (len(elements) > 1 or text[0] == "{"):
            return text[0], elements, text[-1]
        return None
    elements = _split(text)
    separators = elements is not None and _without_separators(text) == text
    return ("", elements, "") if separators and len(elements) > 1 else None


def _split(text: str) -> list[str] | None:
    """Split at the commas outside every bracket; None where brackets do not match, or an element is empty."""
    depth, elements, start = 0, [], 0
    for at, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth < 0:
            return None
        if char == "," and depth == 0:
            elements.append(text[start:at].strip())
            start = at + 1
    elements.append(text[start:].strip())
    return elements if depth == 0 and all(elements) else None


def _same_parts(one: tuple[str, list[str], str], other: tuple[str, list[str], str], depth: int) -> bool:
    (opened, first, closed), (opened_too, second, closed_too) = one, other
    if (opened, closed) != (opened_too, closed_too) or len(first) != len(second):
        return False
    if opened not in ("{", "") or len(first) > MAX_UNORDERED:
        return all(_same(a, b, depth) for a, b in zip(first, second, strict=True))
    left = list(second)
    for element in first:
        match = next((candidate for candidate in left if _same(element, candidate, depth)), None)
        if match is None:
            return False
        left.remove(match)
    return True
