"""Read formulas from text without ``eval``, and compare them by values in bounded time.

:func:`read` builds objects of an algebra: numbers here, sympy's objects in
:mod:`reward_scores.symbolic`. By values, two formulas are taken for equal where they agree at fixed
points of the complex plane, a test of identity that is wrong with probability about zero
(Schwartz-Zippel) and that also tells ``sqrt(x^2)`` from ``x``. Numbers without roots are compared
exactly.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Value = Fraction | float | complex
MAX_CHARS = 500
MAX_DEPTH = 40
MAX_BITS = 4096  # of an exact power
TOLERANCE = 1e-12  # relative, where a root or a transcendental number makes a number inexact
POINT_TOLERANCE = 1e-9  # relative, at a point: formulas written differently round differently
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)|([^\W\d_]+)|(\*\*|[-+*/^()!]))")
MAX_DECIMALS = 10**6  # a longer decimal fraction is not taken for a root or a transcendental number
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **{"sqrt": cmath.sqrt, "ln": cmath.log, "log": cmath.log10, "exp": cmath.exp},
    **{"sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan},
}
# What only :func:`same_value` and its neighbours read; a published reader takes these for products
# of letters or words
_MORE_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **_FUNCTIONS,
    "cot": lambda value: 1 / cmath.tan(value),
    "sec": lambda value: 1 / cmath.cos(value),
    "csc": lambda value: 1 / cmath.sin(value),
    **{"sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh, "abs": abs},
    **{"arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan},
}
_CONSTANTS = {"pi": math.pi}
_MATH_LETTERS = {"e": math.e, "i": 1j}  # in formulas that were written in LaTeX
_POINTS = (complex(0.7391, 0.4142), complex(-1.3203, 0.2718), complex(-0.5772, -1.6449))


class NotAnExpression(ValueError):
    """The text is not a formula, has no value, or is too large to compute."""


def same_value(one: str, other: str) -> bool:
    """Return whether two formulas have the same value, for all values of their one-letter names."""
    try:
        pairs, tolerance = _values(one, other)
        return all(_agree(first, second, tolerance) for first, second in pairs)
    except (NotAnExpression, ArithmeticError, ValueError):
        return False


def ratio(one: str, other: str) -> complex | None:
    """Return the number other than 0 that makes ``one`` of ``other`` for all values of their names;
    None without one.

    Two equations, or inequalities, that are so related on one side of 0 are the same.
    """
    try:
        pairs, tolerance = _values(one, other)
        found = [complex(first / second) for first, second in pairs]
    except (NotAnExpression, ArithmeticError, ValueError):
        return None
    alike = len(found) > 1 and all(
        found[0] != 0 and _agree(found[0], value, tolerance) for value in found
    )
    return found[0] if alike else None


def number(text: str) -> Value | None:
    """Return the value of a formula without names; None for anything else."""
    try:
        return read(tokens(text, latex=True), Values({}), latex=True)
    except (NotAnExpression, ArithmeticError, ValueError, KeyError):
        return None


def _values(one: str, other: str) -> tuple[list[tuple[Value, Value]], float]:
    """Return the values of two formulas at each point, at one where neither has a name, and the
    tolerance there.

    Formulas of sums, products and whole powers are computed exactly at fractions: a term of 1e-20
    counts.
    """
    sides = [tokens(one, latex=True), tokens(other, latex=True)]
    letters = sorted(
        {text for side in sides for text in side if len(text) == 1 and text.isalpha()}
        - {*_MATH_LETTERS}
    )
    if not letters:
        return [_at(sides, {})], TOLERANCE
    if any("!" in side for side in sides):  # a factorial has values at whole numbers only
        return [
            _at(sides, _whole_numbers(letters, point)) for point in range(len(_POINTS))
        ], POINT_TOLERANCE
    try:
        exact = [_at(sides, _fractions(letters, point)) for point in range(len(_POINTS))]
        if all(isinstance(value, Fraction) for pair in exact for value in pair):
            return exact, 0.0
    except (NotAnExpression, ArithmeticError):
        pass  # too large to be exact, or not defined for a real number
    return [
        _at(sides, _environment(letters, point)) for point in range(len(_POINTS))
    ], POINT_TOLERANCE


def _at(sides: Sequence[Sequence[str]], letters: Mapping[str, Value]) -> tuple[Value, Value]:
    one, other = (read(side, Values(letters), latex=True) for side in sides)
    return one, other


def _whole_numbers(letters: Sequence[str], point: int) -> dict[str, Value]:
    """Return whole numbers that grow with the alphabet, so that ``n-k`` is one too."""
    return {name: Fraction((3 + point) * (at + 1) + at) for at, name in enumerate(letters)}


def _fractions(letters: Sequence[str], point: int) -> dict[str, Value]:
    """Return points of both signs, which tell ``sqrt(x^2)`` from ``x`` where both are fractions."""
    return {
        name: Fraction((-1) ** (at + point) * (19 + 10 * at + 6 * point), 7 + 4 * at + 11 * point)
        for at, name in enumerate(letters)
    }


def _environment(letters: list[str], point: int) -> dict[str, complex]:
    return {name: _POINTS[(point + at) % len(_POINTS)] + at / 7 for at, name in enumerate(letters)}


def _agree(one: Value, other: Value, tolerance: float) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    for value in (one, other):
        if tolerance and isinstance(value, Fraction) and value.denominator > MAX_DECIMALS:
            return False  # 3.14159265358979 is not pi
    one = complex(one)
    other = complex(other)
    return cmath.isfinite(one) and cmath.isclose(one, other, rel_tol=tolerance)


def tokens(text: str, latex: bool = False) -> list[str]:
    """Return numbers, names and operators; a name of no function or constant is a product of at
    most two letters.

    ``latex`` knows more functions, as :func:`read` does.
    """
    functions = _MORE_FUNCTIONS if latex else _FUNCTIONS
    if len(text) > MAX_CHARS:
        raise NotAnExpression(f"longer than {MAX_CHARS} characters")
    text = text.strip()
    at = 0
    found_tokens = []
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NotAnExpression(f"{text[at]!r} is no part of a formula")
        at = found.end()
        number, name, operator = found.groups()
        known = name in functions or name in _CONSTANTS
        if known and text[at : at + 1].isdigit():
            raise NotAnExpression(f"{name!r} runs into a number")
        if name and not known:
            if len(name) > 2:
                raise NotAnExpression(f"{name!r} is a word")
            found_tokens += name
        else:
            found_tokens.append(number or name or operator.replace("**", "^"))
    return found_tokens


def read(found: Sequence[str], algebra: Any, latex: bool = False) -> Any:
    r"""Build the object of a formula's tokens by the methods of ``algebra``, which are those of
    :class:`Values`.

    Raises NotAnExpression, and what the algebra raises. ``+ - * /`` and the minus sign are the
    objects' own.

    ``latex`` reads functions as LaTeX writes them (``\ln e^2``, ``\sin 2x``, ``\sin^2 x``) and
    refuses ``a/bc``, which people write for two values.
    """
    reader = _Reader(found, algebra, latex)
    value = reader.sum(0)
    if reader.at < len(found):
        raise NotAnExpression(f"{found[reader.at]!r} is out of place")
    return value


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


class _Reader:
    """A recursive descent over ``sum > product > sign > power > factorial > atom``; adjacent
    factors are multiplied."""

    def __init__(self, found: Sequence[str], algebra: Any, latex: bool):
        self.tokens = found
        self.algebra = algebra
        self.latex = latex
        self.at = 0
        self.functions = _MORE_FUNCTIONS if latex else _FUNCTIONS

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def sum(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotAnExpression(f"more than {MAX_DEPTH} levels")
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            value = (
                value + self.product(depth) if self.take() == "+" else value - self.product(depth)
            )
        return value

    def product(self, depth: int) -> Any:
        value = self.sign(depth)
        while self.peek() and self.peek() not in ("+", "-", ")"):
            operator = self.take() if self.peek() in ("*", "/") else ""
            if not operator and _is_number(self.peek()) and _is_number(self.tokens[self.at - 1]):
                raise NotAnExpression("two numbers side by side")  # 1 000 and 2 1/2 are no products
            bare = self.peek().isalpha() and self.peek() not in self.functions
            factor = self.sign(depth)
            if (
                self.latex
                and operator == "/"
                and bare
                and (self.peek().isalpha() or self.peek() == "(")
            ):
                raise NotAnExpression("a/bc may be a/(bc) or (a/b)c")
            value = value / factor if operator == "/" else value * factor
        return value

    def sign(self, depth: int) -> Any:
        minus = False
        while self.peek() in ("+", "-"):
            minus ^= self.take() == "-"
        value = self.power(depth)
        return -value if minus else value

    def power(self, depth: int) -> Any:
        base = self.factorial(depth)
        if self.peek() != "^":
            return base
        self.take()
        if depth > MAX_DEPTH:
            raise NotAnExpression(f"more than {MAX_DEPTH} levels")
        return self.algebra.power(base, self._exponent(depth + 1))

    def _exponent(self, depth: int) -> Any:
        minus = False
        while self.peek() in ("+", "-"):
            minus ^= self.take() == "-"
        value = self.power(depth)
        return -value if minus else value

    def factorial(self, depth: int) -> Any:
        value = self.atom(depth)
        while self.peek() == "!":
            self.take()
            value = self.algebra.factorial(value)
        return value

    def atom(self, depth: int) -> Any:
        token = self.take()
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise NotAnExpression("a parenthesis is not closed")
            return value
        if token in self.functions:
            if depth >= MAX_DEPTH:
                raise NotAnExpression(f"more than {MAX_DEPTH} levels")
            return (
                self.call_latex(token, depth + 1)
                if self.latex
                else self.algebra.call(token, self.atom(depth + 1))
            )
        if token.isalpha():
            return self.algebra.name(token)
        if _is_number(token):
            return self.algebra.number(token)
        raise NotAnExpression(f"{token or 'the end'!r} is out of place")

    def call_latex(self, function: str, depth: int) -> Any:
        """Read the exponent and the argument of a function: a parenthesis, or factors up to the
        next operator."""
        exponent = None
        if self.peek() == "^":
            self.take()
            exponent = self.atom(depth)
        if self.peek() == "(" or function == "sqrt":
            argument = self.atom(depth)
        else:
            argument = self.sign(depth)
            while _is_number(self.peek()) or (
                self.peek().isalpha() and self.peek() not in self.functions
            ):
                argument = argument * self.power(depth)
        value = self.algebra.call(function, argument)
        return value if exponent is None else self.algebra.power(value, exponent)


class Values:
    """The algebra of numbers: exact where there is no root, and refused where too large to
    compute."""

    def __init__(self, letters: Mapping[str, Value]):
        self.letters = {**_CONSTANTS, **_MATH_LETTERS, **letters}

    def number(self, token: str) -> Fraction:
        _, _, exponent = token.lower().partition("e")
        if exponent and len(exponent) > 4:
            raise NotAnExpression("an exponent of more than three digits")
        return Fraction(token)

    def name(self, name: str) -> Value:
        return self.letters[name]

    def call(self, function: str, value: Value) -> Value:
        if function == "sqrt" and isinstance(value, Fraction) and value >= 0:
            above = math.isqrt(value.numerator)
            below = math.isqrt(value.denominator)
            if above * above == value.numerator and below * below == value.denominator:
                return Fraction(above, below)
        return _MORE_FUNCTIONS[function](value if function == "abs" else complex(value))

    def power(self, base: Value, exponent: Value) -> Value:
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            exact = isinstance(base, Fraction)
            size = max(base.numerator.bit_length(), base.denominator.bit_length()) if exact else 1
            if abs(exponent) * size > MAX_BITS:
                raise NotAnExpression(f"a power of more than {MAX_BITS} bits")
            return base ** int(exponent)
        return complex(base) ** complex(exponent)

    def factorial(self, value: Value) -> Fraction:
        if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 170):
            raise NotAnExpression("the factorial of something else than a whole number up to 170")
        return Fraction(math.factorial(int(value)))
