"""Compare formulas by algebra, with sympy and math-verify. Such work may not end: it belongs into a
grader process.

A scorer that calls this names it in its ``libraries``, and :mod:`core.rewards` then grades its
answers in a pool whose graders are killed at a deadline and replaced. The libraries' own time
limits are off: they use signals, or a process a call. No text is evaluated as code. sympy gets the
objects that :mod:`reward_scores.expressions` reads, not text (its parser calls ``eval``).
math-verify reads LaTeX by a grammar, and only numbers that the grammar has recognised reach that
parser; its reader of plain expressions is off. The libraries are imported when they are first used.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from reward_scores.expressions import NotAnExpression, read, tokens
from reward_scores.normal_form import MAX_CHARS

# What to call in the parent of the workers, so that each of them starts with the library imported
# and warm
SYMPY = "reward_scores.symbolic:warm_sympy"
MATH_VERIFY = "reward_scores.symbolic:warm_math_verify"


def same_formula(one: str, other: str) -> bool:
    """Return whether sympy simplifies the difference of two formulas to 0; False for what is no
    formula."""
    import sympy

    try:
        sides = [read(tokens(text), _Objects(sympy)) for text in (one, other)]
        return sympy.simplify(sides[0] - sides[1]) == 0
    except (
        NotAnExpression,
        ArithmeticError,
        ValueError,
        TypeError,
        RecursionError,
        NotImplementedError,
    ):
        return False  # as published: what sympy cannot work out is not equal


class _Objects:
    """The algebra of sympy objects. Unlike numbers they have no bounds: ``9**9**9**9`` keeps sympy
    busy for good."""

    def __init__(self, sympy: Any):
        self.sympy = sympy

    def number(self, token: str) -> Any:
        return self.sympy.Rational(token)

    def name(self, name: str) -> Any:
        return self.sympy.pi if name == "pi" else self.sympy.Symbol(name)

    def call(self, function: str, value: Any) -> Any:
        return (
            self.sympy.log(value, 10) if function == "log" else getattr(self.sympy, function)(value)
        )

    def power(self, base: Any, exponent: Any) -> Any:
        return base**exponent

    def factorial(self, value: Any) -> Any:
        return self.sympy.factorial(value)


def math_verify_equal(answer: str, gold: str) -> bool:
    """Compare by math-verify as it comes, without a final period; nothing equals nothing, and
    answers beyond MAX_CHARS are texts.

    ``results/rewards/scorers.md`` counts what it takes for equal and is not: 5 km and 5 miles,
    ``x^2=42`` and 42.
    """
    # The end of a sentence
    answer, gold = (text.strip().removesuffix(".") for text in (answer, gold))
    if not answer.strip() or not gold.strip() or max(len(answer), len(gold)) > MAX_CHARS:
        return answer.strip() == gold.strip() != ""
    library = _math_verify()
    only_latex = (library.LatexExtractionConfig(boxed_match_priority=0),)
    options = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    sides = [library.parse(f"\\boxed{{{text}}}", only_latex, **options) for text in (gold, answer)]
    return bool(library.verify(*sides, timeout_seconds=None))


@cache
def _math_verify() -> Any:
    import math_verify

    # It warns once that its time limits are off, which is so by intent
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    return math_verify


def warm_sympy() -> None:
    same_formula("x+1", "1+x")


def warm_math_verify() -> None:
    math_verify_equal("\\frac{1}{2}", "0.5")
