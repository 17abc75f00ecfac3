"""The written forms in which one answer is put to the scorers, and how a response says it.

A rewrite takes a gold answer to another way of writing the same answer, or to None where it does not apply. A frame
takes the written answer to a response. Both are documented by their first line, which the report prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Rewrite = Callable[[str], str | None]

WHOLE = re.compile(r"-?\d+")
FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}")
SEPARATED = re.compile(r"-?\d{1,3}(?:,\d{3})+")


def natural(gold: str) -> str | None:
    """As the data writes it."""
    return gold


def spaced(gold: str) -> str | None:
    """Spaces inside brackets and around signs: ``( 1, 2 )``."""
    text = re.sub(r"([(\[])", r"\1 ", re.sub(r"([)\]])", r" \1", re.sub(r"\s*([+=])\s*", r" \1 ", gold)))
    return text if text != gold and "\\text" not in gold and "\\sqrt[" not in gold and "\\begin" not in gold else None


def dfrac(gold: str) -> str | None:
    r"""``\dfrac`` for ``\frac``."""
    return gold.replace("\\frac", "\\dfrac") if "\\frac" in gold else None


def bare_fraction(gold: str) -> str | None:
    r"""``\frac12`` for ``\frac{1}{2}``."""
    text = re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", gold)
    return text if text != gold else None


def slash(gold: str) -> str | None:
    r"""``1/2`` for ``\frac{1}{2}``."""
    found = FRACTION.fullmatch(gold)
    return f"{found[1]}{found[2]}/{found[3]}" if found else None


def unreduced(gold: str) -> str | None:
    r"""``\frac{2}{4}`` for ``\frac{1}{2}``."""
    found = FRACTION.fullmatch(gold)
    return f"{found[1]}\\frac{{{2 * int(found[2])}}}{{{2 * int(found[3])}}}" if found else None


def decimal(gold: str) -> str | None:
    r"""``0.5`` for ``\frac{1}{2}``, where it ends within six places."""
    found = FRACTION.fullmatch(gold)
    if not found or not int(found[3]):
        return None
    value = Fraction(int(found[2]), int(found[3]))
    return f"{found[1]}{float(value)}" if (value * 10**6).denominator == 1 and value < 10**6 else None


def point_zero(gold: str) -> str | None:
    """``5.0`` for ``5``."""
    return f"{gold}.0" if WHOLE.fullmatch(gold) else None


def thousands(gold: str) -> str | None:
    """``1,080`` for ``1080``, and ``1080`` for ``1,080``."""
    if SEPARATED.fullmatch(gold):
        return gold.replace(",", "")
    return f"{int(gold):,}" if WHOLE.fullmatch(gold) and abs(int(gold)) >= 1000 else None


def latex_thousands(gold: str) -> str | None:
    """``1{,}080`` for ``1080``."""
    text = thousands(gold)
    return text.replace(",", "{,}") if text and "," in text else None


def unit(gold: str) -> str | None:
    r"""``5\text{ cm}`` for ``5``."""
    return f"{gold}\\text{{ cm}}" if WHOLE.fullmatch(gold) else None


def degrees(gold: str) -> str | None:
    r"""``5^\circ`` for ``5``."""
    return f"{gold}^\\circ" if WHOLE.fullmatch(gold) else None


def currency(gold: str) -> str | None:
    r"""``\$5`` for ``5``."""
    return f"\\${gold}" if WHOLE.fullmatch(gold) and not gold.startswith("-") else None


def left_right(gold: str) -> str | None:
    r"""``\left( \right)`` for plain brackets."""
    if not re.fullmatch(r"[(\[][^()\[\]]*[)\]]", gold):
        return None
    return f"\\left{gold[:-1]}\\right{gold[-1]}"


def named(gold: str) -> str | None:
    """``x = 5`` for ``5``."""
    return f"x = {gold}" if WHOLE.fullmatch(gold) or FRACTION.fullmatch(gold) else None


def bare_text(gold: str) -> str | None:
    r"""``even`` for ``\text{even}``."""
    found = re.fullmatch(r"\\text(?:bf)?\{([^{}]+)\}", gold)
    return found[1] if found else None


def typographic_minus(gold: str) -> str | None:
    """The minus sign of typography for the hyphen."""
    return gold.replace("-", "\u2212") if re.fullmatch(r"-\d+", gold) else None


def full_stop(gold: str) -> str | None:
    """``5.`` for ``5``."""
    return f"{gold}."


def in_dollars(gold: str) -> str | None:
    """``$5$`` for ``5``."""
    return f"${gold}$" if "$" not in gold else None


MATHEMATICS: tuple[Rewrite, ...] = (
    *(natural, spaced, dfrac, bare_fraction, slash, unreduced, decimal, point_zero, thousands, latex_thousands),
    *(unit, degrees, currency, left_right, named, bare_text, typographic_minus, full_stop, in_dollars),
)


def hashes(answer: str) -> str:
    """``#### X``."""
    return f"So it is.\n#### {answer}"


def hashes_joined(answer: str) -> str:
    """``####X``."""
    return f"So it is.\n####{answer}"


def hashes_bold(answer: str) -> str:
    """``#### **X**``."""
    return f"So it is.\n#### **{answer}**"


def hashes_dollar(answer: str) -> str:
    """``#### $X``."""
    return f"So it is.\n#### ${answer}"


def hashes_words(answer: str) -> str:
    """``#### X apples``."""
    return f"So it is.\n#### {answer} apples"


def hashes_early(answer: str) -> str:
    """``#### X`` and 400 characters of prose behind it."""
    return f"#### {answer}\nI have checked this. " + "It holds. " * 40


def boxed(answer: str) -> str:
    r"""``\boxed{X}``."""
    return f"So the answer is $\\boxed{{{answer}}}$."


def boxed_early(answer: str) -> str:
    r"""``\boxed{X}`` and 400 characters of prose behind it."""
    return f"So the answer is $\\boxed{{{answer}}}$.\n" + "It holds. " * 40


def boxed_twice(answer: str) -> str:
    r"""``\boxed{X}`` and a last box that is never closed."""
    return f"So $\\boxed{{{answer}}}$. Once more: $\\boxed{{{answer}"


def answer_line(answer: str) -> str:
    """``Answer: X``."""
    return f"So it is.\nAnswer: {answer}"


def answer_bold(answer: str) -> str:
    """``**Answer:** X``."""
    return f"So it is.\n**Answer:** {answer}"


def prose(answer: str) -> str:
    """``The answer is X.``"""
    return f"So it is. The answer is {answer}."


def tagged(answer: str) -> str:
    """``<answer>X</answer>``."""
    return f"<think>hm</think> <answer>{answer}</answer>"


def tagged_often(answer: str) -> str:
    """The same, eleven times."""
    return tagged(answer) * 11


def capitals(gold: str) -> str | None:
    """In capitals."""
    return gold.upper() if gold.upper() != gold else None


def with_article(gold: str) -> str | None:
    """``the X``."""
    return f"the {gold}"


def in_a_sentence(gold: str) -> str | None:
    """``It is X, I think``."""
    return f"It is {gold}, I think"


def hyphens_as_spaces(gold: str) -> str | None:
    """``New York`` for ``New-York``."""
    return gold.replace("-", " ") if "-" in gold else None


WORDS: tuple[Rewrite, ...] = (natural, capitals, with_article, full_stop, hyphens_as_spaces, in_a_sentence)


NUMBERS: tuple[Rewrite, ...] = (natural, point_zero, thousands, typographic_minus, full_stop)
NUMBER_FRAMES = (hashes, hashes_joined, hashes_bold, hashes_dollar, hashes_words, hashes_early, boxed, prose)
MATH_FRAMES = (boxed, boxed_early, boxed_twice, answer_line, answer_bold, prose)


def first_line(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0].rstrip(".")
