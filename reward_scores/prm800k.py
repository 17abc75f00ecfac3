"""OpenAI's PRM800K answer grader, which prime_math and geo3k build on: equal text, or an equal
formula.

Published semantics: equality of formulas is sympy's, which may not end
(``reward_scores.symbolic``). A formula's text is made by a small reader of LaTeX, and what sympy
gets of it by another one, which evaluates nothing.
"""

from __future__ import annotations

import re

from reward_scores.latex import PLAIN, NotLatex, to_text
from reward_scores.math_reward import normalised
from reward_scores.symbolic import same_formula

_TUPLE = "()[]"
_UNITS = """
degree cm centimeter meter mile second minute hour day week month year foot feet inch yard liter
"""
_UNIT_PATTERNS = tuple(re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in _UNITS.split())
_UNSAFE = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_MAX_UNKNOWNS = 2


def grade_answer(given: str | None, gold: str) -> bool:
    """Compare after either normalisation, or part by part; unreduced fractions and 5.0 for 5 in a
    formula fail."""
    if given is None:
        return False
    if _hendrycks(gold) == _hendrycks(given):
        return True
    gold = normalize(gold)
    given = normalize(given)
    if gold == given:
        return gold != ""  # of cm and inch, nothing is left of both
    if not given or not gold:
        return False
    golds = split_tuple(gold)
    givens = split_tuple(given)
    brackets_differ = len(golds) > 1 and (gold[0] != given[0] or gold[-1] != given[-1])
    if brackets_differ or len(golds) != len(givens):
        return False
    return all(_same_element(a, b) for a, b in zip(golds, givens, strict=True))


def _hendrycks(answer: str) -> str:
    answer = answer.strip()
    words = re.search(r"^\\text\{(.+?)\}$", answer)
    return normalised(words[1].strip() if words else answer)


def _same_element(gold: str, given: str) -> bool:
    if _FRACTION.search(gold) and _FRACTION.search(given):
        return gold == given
    if _is_whole_text(gold) != _is_whole_text(given):
        return False
    both = f"({gold})-({given})"
    unknowns = {char for char in both.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    return len(unknowns) <= _MAX_UNKNOWNS and not _UNSAFE.search(both) and same_formula(gold, given)


def normalize(answer: str) -> str:
    """Return lower case without units, currency and percent signs, commands as text, whole numbers
    in one spelling."""
    words = re.search(r"^\\text\{(.+?)\}$", answer)
    text = words[1] if words else answer
    for old in ("\\%", "\\$", "$", "%"):
        text = text.replace(old, "")
    for old, new in ((" or ", " , "), (" and ", " , ")):
        text = text.replace(old, new)
    for old, new in (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")):
        text = text.replace(old, new)
    for unit in _UNIT_PATTERNS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    text = _whole(text) or text
    if "\\" in text:
        text = _as_text(text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub("- *", "-", text)).lower()
    return (_whole(text.replace(",", "")) or text) if _is_whole_text(text) else text


def _as_text(latex: str) -> str:
    try:
        return to_text(
            latex.replace("\\frac", " \\frac")
            .replace("\\tfrac", " \\frac")
            .replace("\\dfrac", " \\frac"),
            PLAIN,
        )
    except NotLatex:
        return latex


def _whole(text: str) -> str | None:
    """Return the nearest whole number where the text is one, up to 1e-7."""
    try:
        number = float(text)
        return str(round(number)) if abs(number - round(number)) <= 1e-7 else None
    except (ValueError, OverflowError):
        return None


def _is_whole_text(text: str) -> bool:
    return _whole(_without_separators(text)) is not None


def _without_separators(text: str) -> str:
    while True:
        shorter = re.sub(r"(\d)(,)(\d\d\d)($|\D)", r"\1\3\4", text)
        if shorter == text:
            return text
        text = shorter


def split_tuple(text: str) -> list[str]:
    """Return the elements of a flat tuple or interval; the text itself for anything else."""
    text = _without_separators(text)
    inner = text[1:-1]
    flat = (
        len(text) > 2
        and text[0] in _TUPLE
        and text[-1] in _TUPLE
        and not any(char in inner for char in _TUPLE)
    )
    return [element.strip() for element in inner.split(",")] if flat else [text]
