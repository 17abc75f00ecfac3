"""Evaluate arithmetic as Python's operators do, without ``eval`` and without numbers that take for
ever.

Formulas with letters and roots are :mod:`reward_scores.expressions`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

Number = int | float | complex
MAX_CHARS = 1000
MAX_BITS = 4096  # of an integer power; 9**9**9 would have 1.2 thousand million


class CannotEvaluate(ValueError):
    """The text is not arithmetic, has no value, or the value is too large to compute."""


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and exponent * base.bit_length() > MAX_BITS:
        raise CannotEvaluate(f"a power of more than {MAX_BITS} bits")
    return base**exponent


_BINARY: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: _power,
}
_UNARY: dict[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(text: str) -> Number:
    """Return the value of numbers joined by ``+ - * / // **`` and parentheses. Raises
    CannotEvaluate for other text."""
    if len(text) > MAX_CHARS:
        raise CannotEvaluate(f"longer than {MAX_CHARS} characters")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except CannotEvaluate:
        raise
    except (
        Exception
        # Of a parser that text can bring to its limits: RecursionError, MemoryError, SystemError
    ) as error:
        raise CannotEvaluate(str(error)) from error


def _value(node: ast.AST) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, complex):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    raise CannotEvaluate(f"{type(node).__name__} is not arithmetic")
