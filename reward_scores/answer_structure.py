r"""The structure of a written answer: tuples, sets, matrices, equations, inequalities, intervals.

Only texts are taken apart here. :mod:`reward_scores.equivalence` compares the parts.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

OPENING = "([{"
CLOSING = ")]}"
COMMA = re.compile(",")
MATRIX = re.compile(
    r"[(\[]?\\begin\{([pbvBV]?(?:small)?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}[)\]]?"
)
# What stands for the answer in front of "=": x, x_1, \theta, area, f(x), f^{-1}(x), \angle ABC,
# \text{Area}, (x,y)
LABEL = re.compile(
    r"(?:\\angle\s*)?(?:(?!\\(?:[dt]?frac|sqrt|pi|infty))\\?[a-zA-Z]\w{0,6}(?:_\{\w+\})?'*"
    r"(?:\^\{-1\})?(?:\s?\([a-zA-Z]\))?"
    r"|\\(?:text|mathrm|mbox)\{[^{}]*\}|\([a-zA-Z](?:, ?[a-zA-Z])+\))"
)
# What is no name of a gold value: 12 is no answer to xy=12, nor 1 to \sin(x)=1; AB is a segment,
# area a word
NO_NAME = re.compile(
    r"(?!sum|age)[a-z]{2,3}|abcde?f?|wxyz|[a-zA-Z]\d+[a-zA-Z]\w*|\w+_\w+_\w+"
    r"|\\?(?:sin|cos|tan|cot|sec|csc|ln|log|exp)\W.*"
)
SEGMENT = re.compile(
    r"\\overline ?\{?[A-Z]{2}\}?|\|[A-Z]{2}\||m ?\\angle ?\{?[A-Z]{1,3}\}?|\\#\(?\w+\)?"
)
WORKED_OUT = re.compile(
    r"\\?(?:lim|int|sum|prod|b?mod|max|min|gcd|lcm|det|Pr|sup|inf|operatorname|begin|angle)(?![a-z])"
)
CALL = re.compile(r"[a-zA-Z]\w?'*(?:\^\{-1\})?\s?\([\w =<>]+\)")
RELATION = re.compile(
    r"\\([lg])(eq?|eqslant|t)(?![a-zA-Z])|(\\(?:equiv|ne)(?![a-zA-Z])|<=|>=|[<>=])"
)
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
OR = re.compile(
    r"\\(?:cup|lor)(?![a-zA-Z])|\\(?:text\w*|mbox|mathrm)\{\s*(?:or|and)\s*\}"
    r"|(?<=[ )\]}])(?:or|and)(?=[ (\[\\])|;"
)


class Parts(NamedTuple):
    """The elements of an answer and the brackets around them.

    ``opened`` is also ``union``, ``and`` (of conditions) or the kind and shape of a matrix.
    """

    opened: str
    elements: list[str]
    closed: str


class Relation(NamedTuple):
    """The sides of an equation, inequality or chain of them; a single side where it is none."""

    sides: list[str]
    operators: list[str]  # "=", "!=", "<", "<=", ">" and ">="

    @property
    def kind(self) -> str:
        """``=`` for an equation, ``<`` for an inequality, and nothing for anything else."""
        if not self.operators:
            return ""
        return "=" if set(self.operators) == {"="} else "<"


def squeezed(text: str) -> str:
    """Return the text without spaces, but those between two numbers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def without_separators(text: str) -> str:
    """Return the text without the commas between thousands."""
    thousands = r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)"
    return re.sub(thousands, lambda match: match[0].replace(",", ""), text)


def depths(text: str) -> list[int]:
    """Return how many brackets are open before each character, and at the end."""
    steps = ((char in OPENING) - (char in CLOSING) for char in text)
    return list(itertools.accumulate(steps, initial=0))


def split(text: str, separator: re.Pattern[str] = COMMA, empty: bool = False) -> list[str] | None:
    """Split at the separators outside every bracket.

    None where brackets do not match, or an element is empty and none may be.
    """
    open_brackets = depths(text)
    if min(open_brackets) < 0 or open_brackets[-1] != 0:
        return None
    elements = []
    start = 0
    for match in separator.finditer(text):
        if open_brackets[match.start()] == 0:
            elements.append(text[start : match.start()].strip())
            start = match.end()
    elements.append(text[start:].strip())
    return elements if empty or all(elements) else None


# -- parts: tuples, sets, lists, intervals, matrices, unions ---------------------------------------


def parts_of(text: str) -> Parts | None:
    """Return brackets and elements of a tuple, interval, set, matrix or union, else None."""
    if "\\{" in text:
        text = text.replace("\\{", "{").replace("\\}", "}")
    if (matrix := MATRIX.fullmatch(text)) is not None:
        return matrix_parts(matrix[1], matrix[2])
    alternatives = split(text, OR)
    if alternatives is not None and len(alternatives) > 1:
        return joined_parts(text, alternatives)
    if text and text[0] in OPENING and text[-1] in CLOSING:
        elements = split(text[1:-1].replace(";", ","))
        if elements is not None:
            is_set = text[0] == "{"
            return Parts(text[0], elements, text[-1]) if len(elements) > 1 or is_set else None
    elements = split(text)
    if elements is None:
        return None
    if len(elements) == 1 and "\\pm" in text:
        signs = (("+", "-"), ("-", "+"))
        elements = [text.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in signs]
    has_thousands = without_separators(text) != text
    return Parts("", elements, "") if len(elements) > 1 and not has_thousands else None


def joined_parts(text: str, alternatives: list[str]) -> Parts:
    """Return the parts of what ``or``, ``and``, a union sign or semicolons join."""
    conditions = [relation_of(each).kind == "<" for each in alternatives]
    intervals = [each[:1] in "([" for each in alternatives]
    if all(is_1 or is_2 for is_1, is_2 in zip(intervals, conditions, strict=True)):
        opened = "and" if "and" in text and any(conditions) else "union"
        return Parts(opened, alternatives, "")
    groups = [split(each) or [each] for each in alternatives]
    if any(map(named_values, groups)):
        tuples = [f"({','.join(named_values(group) or group)})" for group in groups]
        return Parts("", tuples, "")
    return Parts("", [element for group in groups for element in group], "")


def matrix_parts(kind: str, body: str) -> Parts:
    """Return a matrix row by row, and a column as a tuple.

    A determinant or a norm is another thing.
    """
    rows = [row.split("&") for row in re.split(r"\\\\", body.strip().removesuffix("\\\\"))]
    cells = [cell.strip() for row in rows for cell in row]
    name = kind[0] if kind[0] in "vV" else "matrix"
    if name == "matrix" and len(rows) > 1 and all(len(row) == 1 for row in rows):
        return Parts("(", cells, ")")
    return Parts(f"{name} {','.join(str(len(row)) for row in rows)}", cells, "")


def named_values(elements: list[str]) -> list[str] | None:
    """Return the values of ``x=1, y=2`` by their names' order.

    None for anything else than different letters.
    """
    values = {}
    for element in elements:
        if match := re.fullmatch(r"([a-zA-Z]) ?= ?([^=]+)", element):
            values[match[1]] = match[2]
    if len(elements) < 2 or len(values) != len(elements):
        return None
    return [values[name] for name in sorted(values)]


# -- relations: equations and inequalities ---------------------------------------------------------


def relation_of(text: str) -> Relation:
    """Return the sides and operators of an equation, inequality or chain of them."""
    sides = split(text, RELATION)
    if sides is None or len(sides) == 1:
        return Relation([text], [])
    open_brackets = depths(text)
    operators = []
    for match in RELATION.finditer(text):
        if open_brackets[match.start()] > 0:
            continue
        sign = match[3]
        if sign is None:
            sign = ("<" if match[1] == "l" else ">") + ("" if match[2] == "t" else "=")
        operators.append({"\\equiv": "=", "\\ne": "!="}.get(sign, sign))
    return Relation(sides, operators)


def is_label(text: str, value: str) -> bool:
    r"""Return whether the left side only names what the right side gives.

    ``m+n=42``, ``AB^2=42`` and ``f(2)=42`` name it. ``x^2=42``, ``2x=42`` and ``x+1=42`` are
    equations to solve. What names more than one letter names a number.
    """
    if LABEL.fullmatch(text) or WORKED_OUT.search(text):
        return True
    if re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", value)):
        return False
    text = re.sub(r"\\(?:frac|dfrac|cdot|angle|triangle|overline|text|mathrm)", "", text)
    if CALL.fullmatch(text):
        return True
    base = re.sub(r"[\^_](?:\w|\{\w+\})", "", text)
    letters = set(re.findall(r"[a-zA-Z](?:_\w)?", text))
    several = len(letters) > 1 and re.search(r"[a-zA-Z].*[a-zA-Z]", base)
    return bool((several or "\\sum" in text) and not re.search(r"\d", base))


def names_one_value(text: str) -> bool:
    r"""Return whether the left side of a gold equation names its value.

    Such names are x, area, AB, f(2), ``\text{Area}`` and x:y.
    """
    for name in map(str.strip, text.split(":")):
        is_known = any(known.fullmatch(name) for known in (CALL, LABEL, SEGMENT))
        if not (is_known and not NO_NAME.fullmatch(name)) and not WORKED_OUT.search(name):
            return False
    return True


def interval_of(relation: Relation) -> tuple[str, Parts | None]:
    """Return the name and the interval of ``x<3``, ``3>x`` and ``1<x<=3``.

    None for another inequality.
    """
    sides, operators = relation
    if operators[0] in (">", ">="):
        sides = sides[::-1]
        operators = [FLIPPED.get(sign, sign) for sign in reversed(operators)]
    if not set(operators) <= {"<", "<="}:
        return "", None
    if len(sides) == 2 and LABEL.fullmatch(sides[0]):
        sides = ["-\\infty", *sides]
        operators = ["<", *operators]
    elif len(sides) == 2:
        sides = [*sides, "\\infty"]
        operators = [*operators, "<"]
    if len(sides) != 3 or not LABEL.fullmatch(sides[1]):
        return "", None
    opened = "(" if operators[0] == "<" else "["
    closed = ")" if operators[1] == "<" else "]"
    return squeezed(sides[1]), Parts(opened, [sides[0], sides[2]], closed)
