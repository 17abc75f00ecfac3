"""GSM8K: a number after ``####``.

``strict`` and ``flexible`` are verl's ``gsm8k.compute_score``, mistakes included: ``#### 72.``,
``#### $72`` and ``#### 72.0`` are wrong, and only the last 300 characters are read. ``robust``
compares numbers instead of strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reward_scores.equivalence import equivalent
from reward_scores.score import Score, as_text, graded, no_answer
from reward_scores.typography import to_latex

METHODS = ("strict", "flexible", "robust")
WINDOW = 300  # characters from the end that the published variants read
REACH = 2000  # characters behind ####, or from the end, that the robust variant reads
EXAMPLES = (
    ("She has 48 / 2 = 24 clips, 72 in all.\n#### 72", "72", 1.0),
    ("#### -5", "-5", 1.0),
    ("She has 48 / 2 = 24 clips.\n#### 24", "72", 0.0),
    ("I do not know.", "72", 0.0),
)
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"\-?[0-9\.\,]+")
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")
# A number as it may be written: with a sign, a root, fraction or power of ten behind it, an
# exponent, a percent sign
_ATOM = r"\\[dt]?frac\{[0-9]+\}\{[0-9]+\}|\\sqrt(?:\[[0-9]\])?\{[0-9.]+\}"
_POWER = r"\^(?:\{-?[0-9]+\}|-?[0-9]+)"
_WRITTEN = re.compile(
    rf"(?:(?<![\w)\]}}])-)?(?:(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+(?!\w))?"
    rf"(?: ?(?:{_ATOM})| *(?:\\times|\\cdot|\*) *10{_POWER}|(?: "
    rf"[0-9]+)?/[0-9]+|{_POWER})?|\.[0-9]+|{_ATOM})"
    r"(?:\s*\\?%)?"
)
_SEPARATED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:['_][0-9]{3})+(?![0-9])")
_UNIT_POWER = re.compile(r"(?<=[a-zA-Z])[\^_](?:\{[^{}]*\}|-?[0-9]+)")
_SUM = re.compile(r"[^\n=]*\d[^\n=]*=\s*([^\n=]*\d[^\n=]*)(?:\n|$)")  # #### 7 - 2 = 5
_PROSE_DASH = re.compile(r"(?<=\S)\s*[\u2012-\u2015]\s+")


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "strict",
    format_score: float = 0.0,
    correct_score: float = 1.0,
) -> Score:
    """Return ``correct_score`` for the gold number, ``format_score`` for another one, 0 where there
    is none.

    ``method="robust"`` reads the first number after the last ``####``, or the last number where
    there is no ``####``, fractions and powers of numbers with it. It ignores currency, markup and
    separators, and compares by value; the part ``format`` is 1 with ``####``.
    """
    if method not in METHODS:
        raise ValueError(f"gsm8k method={method!r}: must be one of {', '.join(METHODS)}")
    parts = {"format": float("####" in response)} if method == "robust" else {}
    answer = extract(response, method)
    if answer is None:
        return no_answer(**parts)
    # A lone "." or ",": published, it earns what a wrong answer does
    if not re.search("[0-9]", answer):
        return no_answer(format_score, **parts)
    right = _same(answer, ground_truth) if method == "robust" else answer == ground_truth
    return graded(right, answer, correct_score if right else format_score, **parts)


def _same(answer: str, ground_truth: Any) -> bool:
    """Return whether a number that was read is the gold one; percent as in
    :mod:`reward_scores.equivalence`."""
    gold = str(as_text(ground_truth))
    plain = "%" not in answer + gold
    return plain and answer == canonical(gold) or equivalent(answer, gold)


def extract(response: str, method: str) -> str | None:
    """Return the answer as text, or None where there is none."""
    if method == "robust":
        return _extract_robust(response)
    tail = response[-WINDOW:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return found[-1].replace(",", "") if found else None
    found = _FLEXIBLE.findall(tail)
    return next((text for text in reversed(found) if text != "."), "." if found else None)


def _extract_robust(response: str) -> str | None:
    _, mark, tail = response.rpartition("####")
    tail = tail[:REACH] if mark else tail[-REACH:]
    if mark and (equation := _SUM.match(tail)):
        tail = equation[1]
    numbers = _WRITTEN.findall(_plain(tail))
    if not numbers:
        return None
    found = numbers[0 if mark else -1]
    return canonical(found) if _NUMBER.fullmatch(found) else found


def _plain(text: str) -> str:
    """Rewrite typographic characters, and join signs to the number that follows.

    Drops separators of thousands, and exponents of units: the 2 of 5 cm^2 is no number.
    """
    text = to_latex(_PROSE_DASH.sub(" , ", text))
    text = _SEPARATED.sub(lambda found: re.sub("['_]", "", found[0]), _UNIT_POWER.sub("", text))
    return re.sub(
        r"(?<![0-9)\]}])(?<![0-9)\]}] )-[ $\u20ac\u00a3\u00a5\u20b9*{]+(?=[0-9.\\])", "-", text
    )


def canonical(number: Any) -> str | None:
    """Return one spelling a value: no separators, no leading or trailing zeros; None where it is
    not a number.

    Works on text, so that a number of any length is cheap.
    """
    text = re.sub(r"[\s$%]|\.(?=\s*$)", "", _plain(str(as_text(number))))
    if not _NUMBER.fullmatch(text):
        return None
    digits = text.replace(",", "").removeprefix("-")
    whole, _, fraction = digits.partition(".")
    whole = whole.lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" or not text.startswith("-") else f"-{value}"


def check_ground_truth(
    ground_truth: Any, method: str = "strict", format_score: float = 0.0, correct_score: float = 1.0
) -> str | None:
    if method == "robust" and _WRITTEN.fullmatch(_plain(str(as_text(ground_truth)))):
        return None
    if canonical(ground_truth) is None:
        return f"must be a number, got {ground_truth!r:.200}"
    if method == "robust" or (
        isinstance(ground_truth, str) and extract(f"#### {ground_truth}", method) == ground_truth
    ):
        return None
    return (
        f"{ground_truth!r} is never equal to an answer under method={method}: write a string of "
        f"digits without "
        "separators, or set reward_model.reward_kwargs.gsm8k.method=robust"
    )
