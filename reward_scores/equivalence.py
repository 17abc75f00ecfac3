"""Decide whether two written answers are the same, for the ``robust`` variants of the mathematics scorers.

Answers are compared as texts, as numbers and formulas by value, and part by part as tuples, sets, matrices, equations,
inequalities and unions of intervals. Equality by algebra, which may not end, is :mod:`reward_scores.symbolic`.

A percent sign is a factor of 1/100: 50% is 0.5. Where one of the two answers has it and the other is a number above 1
in size, it is also a unit that may be missing: 50% is 50, but 0.5% is not 0.5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from reward_scores.expressions import number, ratio, same_value
from reward_scores.latex import EXACT, NotLatex, to_text
from reward_scores.typography import to_latex

MAX_CHARS = 2000  # longer answers are compared as they stand
MAX_DEPTH = 5  # of tuples within tuples
MAX_UNORDERED = 20  # elements of a set that are matched in any order
_OPEN, _CLOSE = "([{", ")]}"
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|(?<!\\)\\[!,;: ]|\{,\}(?=\d{3})|[$`~]"
    r"|(?<![\w)}\]])\*\*|\*\*(?![\w(\\{.+-])|\\\\$"
)
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:\\(?:text|mbox|mathrm|textrm)\{[^{}\d]*\}(?:\^\{?[23]\}?)?|\^\{?\\circ\}?|\\degree)\s*$"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\\(?:text|mbox|mathrm|textrm)\{\s*(?:per ?cent|\\?%)\s*\}|(?<=\d) per ?cent\b)")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|operatorname)\{([^{}]*)\}")
_MATRIX = re.compile(r"[(\[]?\\begin\{([pbvBV]?(?:small)?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}[)\]]?")
# What stands for the answer in front of "=": x, x_1, \theta, area, f(x), f^{-1}(x), \angle ABC, \text{Area}, (x,y)
_LABEL = re.compile(
    r"(?:\\angle\s*)?(?:\\?[a-zA-Z]\w{0,6}(?:_\{\w+\})?'*(?:\^\{-1\})?(?:\s?\([a-zA-Z]\))?"
    r"|\\(?:text|mathrm|mbox)\{[^{}]*\}|\([a-zA-Z](?:, ?[a-zA-Z])+\))"
)
_CALL = re.compile(r"[a-zA-Z]\w?'*(?:\^\{-1\})?\s?\([a-zA-Z]\)")
_MEMBER = re.compile(r"^[a-zA-Z] ?\\in(?![a-zA-Z]) ?")  # x \in (1,2) is (1,2)
_DESCRIBED = re.compile(r"\\\{ ?[a-zA-Z] ?(?:\\mid|\\vert|\||:) ?(.*)\\\}")  # { x : x < 3 } is x < 3
_RELATION = re.compile(r"\\([lg])(eq?|eqslant|t)(?![a-zA-Z])|(<=|>=|[<>=])")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OR = re.compile(r"\\(?:cup|lor)(?![a-zA-Z])|\\(?:text|mbox|mathrm)\{\s*(?:or|and)\s*\}|(?<= )(?:or|and)(?= )")

Parts = tuple[str, list[str], str]  # brackets around elements; the elements have an order unless the first is in _SETS
_SETS = {"": "", "{": "", "union": "union", "and": "and"}  # kinds that may equal each other: 1, 2 is {1, 2}


def equivalent(one: str, other: str) -> bool:
    """Return whether two answers are equal as text, numbers, formulas, or part by part.

    Ignores layout, currency, units behind a number, separators of thousands, and ``x =`` in front of one of the two.
    What is nothing after that equals nothing.
    """
    one, other = normal(one), normal(other)
    if not one or not other or max(len(one), len(other)) > MAX_CHARS:
        return one == other != ""
    return _same(one, other, 0)


def cleaned(answer: str) -> str:
    """Return the answer without layout, currency, units and words that do not change its value, nor ``x =``."""
    text = normal(answer)
    label, equals, value = text.partition("=")
    is_label = equals and "=" not in value and _LABEL.fullmatch(label.strip())
    return value.strip() if is_label and len(text) <= MAX_CHARS else text


def normal(answer: str) -> str:
    """Return the answer in one spelling, without layout, currency, units and words that do not change its value."""
    if len(answer) > MAX_CHARS:
        return answer.strip()
    text = to_latex(answer).replace("\\$", "").replace("\\\\%", "\\%")
    text = _LAYOUT.sub(lambda found: " " if found[0] in ("\\ ", "\\,", "\\;", "\\:", "~") else "", text).strip()
    text = re.sub(r"(\.\d+)\s*\.{3}", r"\1\\ldots", text)  # 0.333... is not 0.333
    while text.endswith(".") and text.rstrip(".").rstrip():
        text = text[:-1].rstrip()
    text = _PERCENT.sub(r"\\%", text)
    if not re.search(r"\\(?:sin|cos|tan)", text):  # an angle's degrees are no unit to drop
        text = _UNIT.sub("", text)
    text = re.sub(r"([\^_])\{([^\W_])\}(?!\w)", r"\1\2", text)
    text = re.sub(r"(?<![\w)}\]])\+\s*(?=\\infty)", "", text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])", lambda found: found[0].replace(" ", ""), text)
    text = _MEMBER.sub("", text)
    if (described := _DESCRIBED.fullmatch(text)) is not None:
        text = described[1]
    return " ".join(text.split())


def is_decided_here(one: str, other: str) -> bool:
    """Return whether no library may decide otherwise, because it does not know what one of the two holds.

    That is a percent sign, digits that go on, inequalities joined by "and", an equation against a value, and a set
    against a tuple.
    """
    kinds = {(_parts(side) or ("",))[0] for side in (one, other)}
    unknown = any("%" in side or "\\ldots" in side for side in (one, other)) or "and" in kinds
    return unknown or ("{" in kinds and not kinds.isdisjoint("([")) or _is_equation(one) != _is_equation(other)


def _same(one: str, other: str, depth: int) -> bool:
    if _squeezed(one) == _squeezed(other):
        return True
    if depth > MAX_DEPTH:
        return False
    first, second = _parts(one), _parts(other)
    if first is None or second is None:
        operators = _operators(one), _operators(other)
        if any(operators):
            return _same_relations((one, first, operators[0]), (other, second, operators[1]), depth)
    if first is not None or second is not None:
        return first is not None and second is not None and _same_parts(first, second, depth + 1)
    if one.endswith("\\%") or other.endswith("\\%"):
        return _same_percent(one, other, depth + 1)
    if _plain_words(one).casefold() == _plain_words(other).casefold():
        return True
    return _by_value(same_value, one, other) is True


def _squeezed(text: str) -> str:
    """Return the text without spaces, but those between two numbers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def _plain_words(text: str) -> str:
    """Return the text without marks of words and spaces; H_2O is H2O."""
    return re.sub(r"(?<=[a-zA-Z])_(?:\{(\d+)\}|(?=\d))", r"\1", _squeezed(_WORDS.sub(r"\1", text)))


def _by_value(compare: Callable[[str, str], object], one: str, other: str) -> object:
    """Compare two formulas by a function of :mod:`reward_scores.expressions`; None where one is no formula."""
    if "\\text" in one or "\\text" in other:  # words are no formula
        return None
    try:
        return compare(*(to_text(_without_separators(mixed(side)), EXACT) for side in (one, other)))
    except NotLatex:
        return None


def _without_separators(text: str) -> str:
    return re.sub(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", lambda found: found[0].replace(",", ""), text)


def mixed(text: str) -> str:
    """Rewrite mixed numbers as sums: ``2\\frac{1}{2}`` is two and a half."""
    return re.sub(r"(?<![\d.^])(\d+)\s*(\\[dt]?frac\{\d+\}\{\d+\}|\\[dt]?frac\d\d|(?<= )\d+/\d+)", r"(\1+\2)", text)


def _same_percent(one: str, other: str, depth: int) -> bool:
    """Compare two answers of which one ends with a percent sign, or both."""
    if one.endswith("\\%") and other.endswith("\\%"):
        return _same(one[:-2], other[:-2], depth)
    share, bare = (one[:-2], other) if one.endswith("\\%") else (other[:-2], one)
    if _by_value(same_value, f"\\frac{{{mixed(share)}}}{{100}}", bare) is True:
        return True
    size = _by_value(lambda value, _: number(value), bare, "")
    return size is not None and abs(size) > 1 and _same(share, bare, depth)


# --- parts: tuples, sets, lists, intervals, matrices, unions ---


def _parts(text: str) -> Parts | None:
    """Return brackets and elements of a tuple, interval, set, matrix or union; None for anything else."""
    text = text.replace("\\{", "{").replace("\\}", "}") if "\\{" in text else text
    if (matrix := _MATRIX.fullmatch(text)) is not None:
        return _matrix(matrix[1], matrix[2])
    found = _split(text, _OR)
    if found is not None and len(found) > 1:
        ranges = all(_operators(each) not in ("", "=") or each[:1] in "([" for each in found)
        return (("and" if "and" in text else "union") if ranges else "", found, "")
    if text[:1] in _OPEN and text[-1:] in _CLOSE and text[:1]:
        elements = _split(text[1:-1])
        if elements is not None:
            return (text[0], elements, text[-1]) if len(elements) > 1 or text[0] == "{" else None
    elements = _split(text)
    if elements is not None and len(elements) == 1 and "\\pm" in text:
        signs = (("+", "-"), ("-", "+"))
        elements = [text.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in signs]
    separators = elements is not None and _without_separators(text) == text
    return ("", elements, "") if separators and len(elements) > 1 else None


def _matrix(kind: str, body: str) -> Parts:
    """Return a matrix row by row. Its kind of brackets counts only where it makes a determinant or norm of it."""
    rows = [row.split("&") for row in re.split(r"\\\\", body.strip().removesuffix("\\\\"))]
    shape = ",".join(str(len(row)) for row in rows)
    name = kind[0] if kind[0] in "vV" else "matrix"
    return f"{name} {shape}", [cell.strip() for row in rows for cell in row], ""


def _split(text: str, separator: re.Pattern[str] = re.compile(",")) -> list[str] | None:
    """Split at the separators outside every bracket; None where brackets do not match, or an element is empty."""
    places = {found.start(): found.end() for found in separator.finditer(text)}
    depth, elements, start = 0, [], 0
    for at, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth < 0:
            return None
        if at in places and depth == 0:
            elements.append(text[start:at].strip())
            start = places[at]
    elements.append(text[start:].strip())
    return elements if depth == 0 and all(elements) else None


def _same_parts(one: Parts, other: Parts, depth: int) -> bool:
    (opened, first, closed), (opened_too, second, closed_too) = one, other
    unordered = opened in _SETS
    if unordered:
        same_kind = _SETS[opened] == _SETS.get(opened_too)
    else:
        same_kind = (opened, closed) == (opened_too, closed_too)
    if not same_kind or len(first) != len(second):
        return False
    if not unordered or len(first) > MAX_UNORDERED:
        return all(_same(a, b, depth) for a, b in zip(first, second, strict=True))
    left = list(second)
    for element in first:
        match = next((candidate for candidate in left if _same(element, candidate, depth)), None)
        if match is None:
            return False
        left.remove(match)
    return True


# --- relations: equations and inequalities ---


def _relation(text: str) -> tuple[list[str], list[str]]:
    """Return the sides and operators (``=``, ``<``, ``<=``, ...) of an equation, inequality or chain of them."""
    found = list(_RELATION.finditer(text))
    sides = _split(text, _RELATION)
    if not found or sides is None or len(sides) != len(found) + 1:
        return [text], []
    return sides, [each[3] or ("<" if each[1] == "l" else ">") + ("" if each[2] == "t" else "=") for each in found]


def _operators(text: str) -> str:
    """Return ``=`` for an equation, ``<`` for an inequality, and nothing for anything else."""
    operators = set(_relation(text)[1])
    return "" if not operators else "=" if operators == {"="} else "<"


def _is_equation(text: str) -> bool:
    return _operators(text) == "="


def _same_relations(one: tuple[str, Parts | None, str], other: tuple[str, Parts | None, str], depth: int) -> bool:
    """Compare two answers of which one at least is an equation or inequality."""
    (text, parts, kind), (text_too, parts_too, kind_too) = one, other
    if kind == kind_too == "=":
        return _same_equations(_relation(text)[0], _relation(text_too)[0], depth)
    if "=" in (kind, kind_too):
        sides, bare = (_relation(text)[0], text_too) if kind else (_relation(text_too)[0], text)
        sides = sides[::-1] if _LABEL.fullmatch(sides[-1]) else sides
        values = sides[1:] if _LABEL.fullmatch(sides[0]) else sides
        alike = all(_same(value, values[-1], depth + 1) for value in values[:-1])
        return not (kind and kind_too) and alike and _same(values[-1], bare, depth + 1)
    if kind and kind_too:
        return _same_inequalities(_relation(text), _relation(text_too), depth)
    name, interval = _interval(*_relation(text if kind else text_too))
    parts = parts_too if kind else parts
    return interval is not None and parts is not None and _same_parts(interval, parts, depth + 1)


def _same_equations(one: list[str], other: list[str], depth: int) -> bool:
    """Compare two equations: by what their equal labels stand for, or as multiples of each other."""
    first, second = one[0], other[0]
    labels = all(_LABEL.fullmatch(side) for side in (first, second))
    named = labels and (_squeezed(first) == _squeezed(second) or any(map(_CALL.fullmatch, (first, second))))
    if named and len(one) == len(other) == 2:
        return _same(one[1], other[1], depth + 1)
    if len(one) != 2 or len(other) != 2:
        return len(one) == len(other) and all(_same(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    return _by_value(ratio, _difference(one), _difference(other)) is not None


def _same_inequalities(one: tuple[list[str], list[str]], other: tuple[list[str], list[str]], depth: int) -> bool:
    (name, interval), (name_too, interval_too) = _interval(*one), _interval(*other)
    if interval is not None and interval_too is not None:
        return name == name_too and _same_parts(interval, interval_too, depth + 1)
    if len(one[0]) != 2 or len(other[0]) != 2:
        return False
    factor = _by_value(ratio, _difference(one[0]), _difference(other[0]))
    if factor is None or abs(factor.imag) > abs(factor.real) * 1e-9:
        return False
    return one[1][0] == (other[1][0] if factor.real > 0 else _FLIPPED[other[1][0]])


def _difference(sides: Sequence[str]) -> str:
    return f"({sides[0]})-({sides[1]})"


def _interval(sides: list[str], operators: list[str]) -> tuple[str, Parts | None]:
    """Return the name and the interval of ``x<3``, ``3>x`` and ``1<x<=3``; None for another inequality."""
    if operators[0] in (">", ">="):
        sides, operators = sides[::-1], [_FLIPPED.get(each, each) for each in reversed(operators)]
    if not set(operators) <= {"<", "<="}:
        return "", None
    if len(sides) == 2:
        if _LABEL.fullmatch(sides[0]):
            sides, operators = ["-\\infty", *sides], ["<", *operators]
        else:
            sides, operators = [*sides, "\\infty"], [*operators, "<"]
    if len(sides) != 3 or not _LABEL.fullmatch(sides[1]):
        return "", None
    opened, closed = "(" if operators[0] == "<" else "[", ")" if operators[1] == "<" else "]"
    return _squeezed(sides[1]), (opened, [sides[0], sides[2]], closed)
