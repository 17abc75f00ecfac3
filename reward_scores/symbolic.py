"""Compare formulas by algebra, with sympy and math-verify. Such work may not end: it belongs into a grader process.

A scorer that calls this names it in its ``libraries``, and :mod:`core.rewards` then grades its answers in a pool whose
graders are killed at a deadline and replaced. The libraries' own time limits are off: they use signals, or a process a
call. No text is evaluated as code. sympy gets the objects that :mod:`reward_scores.expressions` reads, not text (its
parser calls ``eval``). math-verify reads LaTeX by a grammar, and only numbers that the grammar has recognised reach
that parser; its reader of plain expressions is off. The libraries are imported when they are first used.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from functools import cache, partial
from typing import Any

from reward_scores.equivalence import MAX_CHARS, equivalent, is_decided_here, mixed, normal
from reward_scores.expressions import NotAnExpression, read, tokens

# What to call in the parent of the workers, so that each of them starts with the library imported and warm
SYMPY, MATH_VERIFY = "reward_scores.symbolic:warm_sympy", "reward_scores.symbolic:warm_math_verify"
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.?\d*)[eE]([+-]?\d+)(?!\w)")


def same_formula(one: str, other: str) -> bool:
    """Return whether sympy simplifies the difference of two formulas to 0; False for what is no formula."""
    import sympy

    try:
        sides = [read(tokens(text), _Objects(sympy)) for text in (one, other)]
        return sympy.simplify(sides[0] - sides[1]) == 0
    except (NotAnExpression, ArithmeticError, ValueError, TypeError, RecursionError, NotImplementedError):
        return False  # as published: what sympy cannot work out is not equal


class _Objects:
    """The algebra of sympy objects. Unlike numbers they have no bounds: ``9**9**9**9`` keeps sympy busy for good."""

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
    """Compare by :func:`reward_scores.equivalence.equivalent`, and where that sees no equality by math-verify.

    The rules of that module for percent signs, and for an equation against a value, hold here too. Nothing equals
    nothing; answers longer than MAX_CHARS are compared as texts. math-verify gets the answers without currency, units
    and layout. It takes a decimal fraction for a number that rounds to it; of numbers below 1 it compares as many
    digits (its own comparison takes all numbers below 1e-6, or 1e-15, for 0).
    """
    if equivalent(answer, gold):
        return True
    answer, gold = normal(answer), normal(gold)
    if not answer or not gold or max(len(answer), len(gold)) > MAX_CHARS or is_decided_here(answer, gold):
        return False
    return _verify(_parsed(gold), _parsed(answer))


@cache
def _math_verify() -> tuple[Any, Any]:
    """Return math-verify, and a copy of its grader that compares numbers as :func:`_same_number` does."""
    import math_verify

    # It warns once that its time limits are off, which is so by intent
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    spec = importlib.util.find_spec("math_verify.grader")
    grader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grader)  # a copy: the library stays as it is for a user's own function
    grader.sympy_numeric_eq = partial(_same_number, grader.sympy_numeric_eq)
    return math_verify, grader


def _same_number(library: Any, one: Any, other: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compare two of sympy's objects by the library, and numbers that it takes for equal relative to their size."""
    if not library(one, other, float_rounding, numeric_precision):
        return False
    if getattr(one, "is_Matrix", False) or getattr(other, "is_Matrix", False):
        return True  # the library compares each element here
    one, other = one.doit(), other.doit()
    if one == other or one.free_symbols or other.free_symbols:
        return one == other  # algebra, which the library asks next, decides on names
    decimal = one.has(*_floats()) or other.has(*_floats())
    size = max(abs(one.evalf(numeric_precision)), abs(other.evalf(numeric_precision)))
    bound = 10.0**-float_rounding if decimal else 10.0 ** (1 - numeric_precision)
    return bool(abs((one - other).evalf(numeric_precision)) <= bound * size)


def _floats() -> tuple[Any, ...]:
    import sympy

    return (sympy.Float,)


def _parsed(text: str) -> list[Any]:
    library, _ = _math_verify()
    only_latex = (library.LatexExtractionConfig(boxed_match_priority=0),)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", mixed(text))  # the library reads 1e5 as a product
    return library.parse(f"\\boxed{{{text}}}", only_latex, fallback_mode="no_fallback", parsing_timeout=None)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    _, grader = _math_verify()
    both = bool(gold and answer)
    return both and grader.verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)


def warm_sympy() -> None:
    same_formula("x+1", "1+x")


def warm_math_verify() -> None:
    _verify(_parsed("\\frac{1}{2}"), _parsed("0.5"))
