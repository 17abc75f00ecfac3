"""Equality by algebra: sympy and math-verify. Such work may not end, so that it belongs into a worker with a deadline.

A scorer that calls this names it in its ``libraries``, and :mod:`core.rewards` then grades its answers in a pool whose
workers are killed and replaced. The libraries' own time limits are off: they use signals, or a process a call.
No text is evaluated as code. sympy gets the objects that :mod:`reward_scores.expressions` reads, not text (its parser
calls ``eval``); math-verify reads LaTeX by a grammar, of which only the numbers that the grammar has recognised reach
that parser, and its reader of plain expressions is off.
The libraries are imported when they are first used.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from reward_scores.equivalence import MAX_CHARS, cleaned
from reward_scores.expressions import NotAnExpression, read, tokens

# What to call in the parent of the workers, so that each of them starts with the library imported and warm
SYMPY, MATH_VERIFY = "reward_scores.symbolic:warm_sympy", "reward_scores.symbolic:warm_math_verify"


def same_formula(one: str, other: str) -> bool:
    """Whether sympy simplifies the difference of two formulas to 0; False for what is no formula."""
    import sympy

    try:
        sides = [read(tokens(text), _Objects(sympy)) for text in (one, other)]
        return sympy.simplify(sides[0] - sides[1]) == 0
    except (NotAnExpression, ArithmeticError, ValueError, TypeError, RecursionError, NotImplementedError):
        return False  # as published: what sympy cannot work out is not equal


class _Objects:
    """Formulas as sympy objects. Unlike numbers they have no bounds: ``9**9**9**9`` keeps sympy busy for good."""

    def __init__(self, sympy: Any):
        self.sympy = sympy

    def number(self, token: str) -> Any:
        return self.sympy.Rational(token)

    def name(self, name: str) -> Any:
        return self.sympy.pi if name == "pi" else self.sympy.Symbol(name)

    def call(self, function: str, value: Any) -> Any:
        return self.sympy.log(value, 10) if function == "log" else getattr(self.sympy, function)(value)

    def power(self, base: Any, exponent: Any) -> Any:
        return base**exponent

    def factorial(self, value: Any) -> Any:
        return self.sympy.factorial(value)


def math_verify_equal(answer: str, gold: str) -> bool:
    """Equal as text after :func:`reward_scores.equivalence.cleaned`, or for math-verify.

    Nothing equals nothing; answers longer than MAX_CHARS are compared as texts. math-verify is asked about what is left
    of currency, units and layout.
    """
    answer, gold = cleaned(answer), cleaned(gold)
    if not answer or not gold or max(len(answer), len(gold)) > MAX_CHARS:
        return answer == gold != ""
    return answer == gold or _verify(_parsed(gold), _parsed(answer))


@cache
def _math_verify() -> Any:
    import math_verify

    # It warns once that its time limits are off, which is so by intent
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    return math_verify


def _parsed(text: str) -> list[Any]:
    library = _math_verify()
    only_latex = (library.LatexExtractionConfig(boxed_match_priority=0),)
    return library.parse(f"\\boxed{{{text}}}", only_latex, fallback_mode="no_fallback", parsing_timeout=None)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    return bool(gold and answer) and _math_verify().verify(gold, answer, timeout_seconds=None)


def warm_sympy() -> None:
    same_formula("x+1", "1+x")


def warm_math_verify() -> None:
    math_verify_equal("\\frac{1}{2}", "0.5")
