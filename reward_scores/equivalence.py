r"""Decide whether two written answers are the same, for the ``robust`` variants of the mathematics
scorers.

Answers are compared as texts, as numbers and formulas by value, and part by part as tuples, sets,
matrices, equations, inequalities and unions of intervals. Equality by algebra, which may not end,
is :mod:`reward_scores.symbolic`.

* A unit may be missing on one side; two units that differ are not equal.
* A percent sign is a factor of 1/100: 50% is 0.5. Where the other answer is a number above 1 in
  size, it is also a unit that may be missing: 50% is 50, but 0.5% is not 0.5.
* What stands for the answer in front of ``=`` may be missing on one side. An answer may name more
  than a gold one does: ``m+n=42`` is right for 42, and 42 is wrong for ``m+n=42``; ``x^2=42`` is
  not 42. A residue is no congruence.
* An exact value may have an approximation behind it, and is what counts, unless the other answer is
  that approximation.

The order of the two matters for this: the answer is first, the gold one second.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from reward_scores.expressions import number, ratio, same_value
from reward_scores.latex import NotLatex, formulas
from reward_scores.normal_form import (
    MAX_CHARS,
    choice,
    normal,
    number_of_base,
    plain_words,
    split_modulus,
    split_unit,
)

MAX_DEPTH = 5  # of tuples within tuples
MAX_UNORDERED = 20  # elements of a set that are matched in any order
_OPEN, _CLOSE = "([{", ")]}"
_MATRIX = re.compile(
    r"[(\[]?\\begin\{([pbvBV]?(?:small)?matrix|array)\}(?:\{[lcr| "
    r"]*\})?(.*)\\end\{\1\}[)\]]?"
)
_APPROX = re.compile(r"\\approx(?![a-zA-Z]) ?")
# (x,y) = in front of tuples
_NAMES = re.compile(r"^\([a-zA-Z]\w?(?:, ?[a-zA-Z]\w?)+\) ?= ?(?=[(\[{\\])")
# What stands for the answer in front of "=": x, x_1, \theta, area, f(x), f^{-1}(x), \angle ABC,
# \text{Area}, (x,y)
_LABEL = re.compile(
    r"(?:\\angle\s*)?(?:(?!\\(?:[dt]?frac|sqrt|pi|infty))\\?[a-zA-Z]\w{0,6}(?:_\{\w+\})?'*(?:\^\{-1\})?(?:\s?\([a-zA-Z]\))?"
    r"|\\(?:text|mathrm|mbox)\{[^{}]*\}|\([a-zA-Z](?:, ?[a-zA-Z])+\))"
)
# What is no name of a gold value: 12 is no answer to xy=12, nor 1 to \sin(x)=1; AB is a segment,
# area a word
_NO_NAME = re.compile(
    r"(?!sum|age)[a-z]{2,3}|abcde?f?|wxyz|[a-zA-Z]\d+[a-zA-Z]\w*|\w+_\w+_\w+|\\?(?:sin|cos|tan|cot|sec|csc|ln|log|exp)\W.*"
)
_SEGMENT = re.compile(
    r"\\overline ?\{?[A-Z]{2}\}?|\|[A-Z]{2}\||m ?\\angle "
    r"?\{?[A-Z]{1,3}\}?|\\#\(?\w+\)?"
)
_WORKED_OUT = re.compile(
    r"\\?(?:lim|int|sum|prod|b?mod|max|min|gcd|lcm|det|Pr|sup|inf|operatorname|begin|angle)(?![a-z])"
)
_CALL = re.compile(r"[a-zA-Z]\w?'*(?:\^\{-1\})?\s?\([\w =<>]+\)")
_RELATION = re.compile(
    r"\\([lg])(eq?|eqslant|t)(?![a-zA-Z])|(\\(?:equiv|ne)(?![a-zA-Z])|<=|>=|[<>=])"
)
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OR = re.compile(
    r"\\(?:cup|lor)(?![a-zA-Z])|\\(?:text\w*|mbox|mathrm)\{\s*(?:or|and)\s*\}|(?<=[ "
    r")\]}])(?:or|and)(?=[ (\[\\])|;"
)

# Brackets around elements; the elements have an order unless the first is in _SETS
Parts = tuple[str, list[str], str]
# Kinds that may equal each other: 1, 2 is {1, 2}
_SETS = {"": "", "{": "", "union": "", "and": "and"}


def equivalent(answer: str, gold: str) -> bool:
    """Return whether an answer equals the gold one as text, number, formula, or part by part.

    What is nothing but layout equals nothing.
    """
    one, other = normal(answer), normal(gold)
    if (
        not re.search(r"\w", one)
        or not re.search(r"\w", other)
        or max(len(one), len(other)) > MAX_CHARS
    ):
        return one == other and bool(re.search(r"\w", one))
    if choice(other, alone=True):
        one = re.sub(r"^\(([a-j])\)$", lambda found: found[0].upper(), one)
    if choice(one, alone=True) or choice(other, alone=True):
        return one == other or choice(one) == choice(other)
    (one, modulus), (other, modulus_too) = split_modulus(one), split_modulus(other)
    if modulus_too and modulus != modulus_too:
        return False
    if modulus and modulus_too and _same_residue(one, other, modulus):
        return True
    golds = _readings(number_of_base(other))
    return any(
        _same(each, wanted, 0) for each in _readings(number_of_base(one)) for wanted in golds
    )


def _readings(text: str) -> list[str]:
    r"""Return the text, or the exact value in front of ``\approx`` and what follows it where that
    rounds the value."""
    exact, *rounded = _split(text, _APPROX, empty=True) or [text]
    if not rounded:
        return [text]
    value = _relation(exact)[0][-1]
    if not exact or _LABEL.fullmatch(value):
        return [rounded[-1]]
    sizes = [_by_value(lambda one, _: number(one), side, "") for side in (value, rounded[-1])]
    digits = re.search(r"\.(\d+)", rounded[-1])
    step = 10.0 ** -len(digits[1] if digits else "")
    close = None not in sizes and abs(sizes[0] - sizes[1]) <= 0.5000001 * step
    return [exact, rounded[-1]] if close else [exact]


def _same_residue(one: str, other: str, modulus: str) -> bool:
    """Compare two whole numbers, each alone or behind one name and a sign of congruence."""
    residues = [
        re.fullmatch(r"(?:[a-zA-Z] ?(?:\\equiv|=) ?)?(-?\d{1,30})", side) for side in (one, other)
    ]
    if None in residues or not re.fullmatch(r"[1-9]\d{0,30}", modulus):
        return False
    return (int(residues[0][1]) - int(residues[1][1])) % int(modulus) == 0


def cleaned(answer: str) -> str:
    """Return the answer without layout, words that do not change its value, and ``x =``; its unit
    in one spelling."""
    text = normal(answer)
    if len(text) > MAX_CHARS:
        return text
    text, modulus = split_modulus(text)
    value, unit = split_unit(text)
    sides, operators = _relation(value)
    if operators == ["="] and _is_label(sides[0], sides[1]):
        value = sides[1]
    value += "\\%" if unit == "%" else f" {unit}" if unit else ""
    return value + (f" mod {modulus}" if modulus else "")


def _same(one: str, other: str, depth: int) -> bool:
    if _squeezed(one) == _squeezed(other):
        return True
    if depth > MAX_DEPTH:
        return False
    one, other = _NAMES.sub("", one), _NAMES.sub("", other)
    first, second = _parts(one), _parts(other)
    if first is None or second is None:
        operators = _operators(one), _operators(other)
        if any(operators):
            return _same_relations((one, first, operators[0]), (other, second, operators[1]), depth)
    if first is not None and second is not None:
        return _same_parts(first, second, depth + 1)
    if first is not None or second is not None:
        parts = second if first is None else first
        if parts[0] != "{" or len(parts[1]) != 1:
            return False
        return (
            _same(one, parts[1][0], depth + 1)
            if first is None
            else _same(parts[1][0], other, depth + 1)
        )
    (value, unit), (value_too, unit_too) = split_unit(one), split_unit(other)
    if unit and unit_too:
        general = (
            unit[0] == "^"
            and unit_too.endswith(unit)
            or unit_too[0] == "^"
            and unit.endswith(unit_too)
        )
        return (unit == unit_too or general) and _same_values(value, value_too)  # square units
    if "%" in (unit, unit_too):
        return _same_percent(value, value_too) if unit else _same_percent(value_too, value)
    return _same_values(value, value_too)


def _same_values(one: str, other: str) -> bool:
    words, words_too = (
        re.sub(r"(?<=[a-zA-Z])_(?:\{(\d+)\}|(?=\d))", r"\1", plain_words(side))
        for side in (one, other)
    )
    if _squeezed(words) == _squeezed(words_too):  # H_2O is H2O
        return True
    if len(words) > 2 and _squeezed(words).casefold() == _squeezed(words_too).casefold():
        return True
    return _by_value(same_value, one, other) is True or _same_ratio(one, other)


def _squeezed(text: str) -> str:
    """Return the text without spaces, but those between two numbers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def _by_value(compare: Callable[[str, str], object], one: str, other: str) -> object:
    """Compare two formulas by a function of :mod:`reward_scores.expressions`; None where one is no
    formula."""
    if "\\text" in one or "\\text" in other:  # words are no formula
        return None
    try:
        return compare(
            *formulas(_without_separators(mixed(one)), _without_separators(mixed(other)))
        )
    except NotLatex:
        return None


def _without_separators(text: str) -> str:
    return re.sub(
        r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", lambda found: found[0].replace(",", ""), text
    )


def mixed(text: str) -> str:
    """Rewrite mixed numbers as sums: ``2\\frac{1}{2}`` is two and a half."""
    return re.sub(
        r"(?<![\d.^])(\d+)\s*(\\[dt]?frac\{\d+\}\{\d+\}|\\[dt]?frac\d\d|(?<= )\d+/\d+)",
        r"(\1+\2)",
        text,
    )


def _same_percent(share: str, bare: str) -> bool:
    """Compare a number of percent with a number that has no sign."""
    if _by_value(same_value, f"\\frac{{{mixed(share)}}}{{100}}", bare) is True:
        return True
    size = _by_value(lambda value, _: number(value), bare, "")
    return size is not None and abs(size) > 1 and _same_values(share, bare)


def _same_ratio(one: str, other: str) -> bool:
    """Compare 1:2:3 with 2:4:6; 12:00 is a time and is compared as text."""
    sides = one.split(":"), other.split(":")
    if (
        len(sides[0]) != len(sides[1])
        or len(sides[0]) < 2
        or any(re.fullmatch(r"\d+:\d\d", x) for x in (one, other))
    ):
        return False
    (first, *rest), (first_too, *rest_too) = sides
    pairs = zip(rest, rest_too, strict=True)
    return all(
        _by_value(same_value, f"({a})({first_too})", f"({b})({first})") is True for a, b in pairs
    )


# --- parts: tuples, sets, lists, intervals, matrices, unions ---


def _parts(text: str) -> Parts | None:
    """Return brackets and elements of a tuple, interval, set, matrix or union; None for anything
    else."""
    text = text.replace("\\{", "{").replace("\\}", "}") if "\\{" in text else text
    if (matrix := _MATRIX.fullmatch(text)) is not None:
        return _matrix(matrix[1], matrix[2])
    found = _split(text, _OR)
    if found is not None and len(found) > 1:
        ordered = [_operators(each) not in ("", "=") for each in found]
        if all(each[:1] in "([" or less for each, less in zip(found, ordered, strict=True)):
            return ("and" if "and" in text and any(ordered) else "union", found, "")
        groups = [_split(each) or [each] for each in found]
        if any(map(_named, groups)):
            return ("", [f"({','.join(_named(group) or group)})" for group in groups], "")
        return ("", [item for group in groups for item in group], "")
    if text[:1] in _OPEN and text[-1:] in _CLOSE and text[:1]:
        elements = _split(text[1:-1].replace(";", ","))
        if elements is not None:
            return (text[0], elements, text[-1]) if len(elements) > 1 or text[0] == "{" else None
    elements = _split(text)
    if elements is not None and len(elements) == 1 and "\\pm" in text:
        signs = (("+", "-"), ("-", "+"))
        elements = [text.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in signs]
    separators = elements is not None and _without_separators(text) == text
    return ("", elements, "") if separators and len(elements) > 1 else None


def _matrix(kind: str, body: str) -> Parts:
    """Return a matrix row by row, and a column as a tuple. A determinant or a norm is another
    thing."""
    rows = [row.split("&") for row in re.split(r"\\\\", body.strip().removesuffix("\\\\"))]
    cells, name = (
        [cell.strip() for row in rows for cell in row],
        kind[0] if kind[0] in "vV" else "matrix",
    )
    if name == "matrix" and len(rows) > 1 and all(len(row) == 1 for row in rows):
        return "(", cells, ")"
    return f"{name} {','.join(str(len(row)) for row in rows)}", cells, ""


def _named(elements: list[str]) -> list[str] | None:
    """Return the values of ``x=1, y=2`` by their names' order; None for anything else than
    different letters."""
    named = dict(
        found.groups()
        for each in elements
        if (
            found := re.fullmatch(
                r"([a-zA-Z]) ?= "
                r"?([^=]+)",
                each,
            )
        )
    )
    return [named[name] for name in sorted(named)] if len(named) == len(elements) > 1 else None


def _split(
    text: str, separator: re.Pattern[str] = re.compile(","), empty: bool = False
) -> list[str] | None:
    """Split at the separators outside every bracket; None where brackets do not match, or an
    element is ``empty``."""
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
    return elements if depth == 0 and (empty or all(elements)) else None


def _same_parts(one: Parts, other: Parts, depth: int) -> bool:
    (opened, first, closed), (opened_too, second, closed_too) = one, other
    # x=1, y=2 and (1,2)
    if opened == "" and opened_too == "(" or opened == "(" and opened_too == "":
        first, second = ((_named(side) or side) for side in (first, second))
        return (
            len(first) == len(second)
            and (first, second) != (one[1], other[1])
            and _same_parts(("(", first, ")"), ("(", second, ")"), depth)
        )
    unordered = opened in _SETS
    if unordered:
        same_kind = _SETS[opened] == _SETS.get(opened_too)
    else:
        same_kind = (opened, closed) == (opened_too, closed_too)
    if unordered:
        first, second = _without_copies(opened, first), _without_copies(opened_too, second)
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


def _without_copies(opened: str, elements: list[str]) -> list[str]:
    """Return a set's elements, or the tuples of a list, each once: as solutions of a problem, twice
    is once."""
    once = opened == "{" or (opened == "" and all(each[:1] == "(" for each in elements))
    return list(dict.fromkeys(map(_squeezed, elements))) if once else elements


# --- relations: equations and inequalities ---


def _relation(text: str) -> tuple[list[str], list[str]]:
    """Return the sides and operators (``=``, ``<``, ``<=``, ...) of an equation, inequality or
    chain of them."""
    sides = _split(text, _RELATION)
    if sides is None or len(sides) == 1:
        return [text], []
    depths = list(
        itertools.accumulate(((char in _OPEN) - (char in _CLOSE) for char in text), initial=0)
    )
    found = [each for each in _RELATION.finditer(text) if depths[each.start()] == 0]
    signs = [
        each[3] or ("<" if each[1] == "l" else ">") + ("" if each[2] == "t" else "=")
        for each in found
    ]
    return sides, [{"\\equiv": "=", "\\ne": "!="}.get(sign, sign) for sign in signs]


def _operators(text: str) -> str:
    """Return ``=`` for an equation, ``<`` for an inequality, and nothing for anything else."""
    operators = set(_relation(text)[1])
    return "" if not operators else "=" if operators == {"="} else "<"


def _is_label(text: str, value: str) -> bool:
    r"""Return whether the left side only names what the right side gives: ``m+n=42``, ``AB^2=42``,
    ``f(2)=42``.

    ``x^2=42``, ``2x=42`` and ``x+1=42`` are equations to solve. What names more than one letter
    does so for a number.
    """
    if _LABEL.fullmatch(text) or _WORKED_OUT.search(text):
        return True
    if re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", value)):
        return False
    text = re.sub(r"\\(?:frac|dfrac|cdot|angle|triangle|overline|text|mathrm)", "", text)
    named = re.sub(r"[\^_](?:\w|\{\w+\})", "", text)
    several = len(set(re.findall(r"[a-zA-Z](?:_\w)?", text))) > 1 and re.search(
        r"[a-zA-Z].*[a-zA-Z]", named
    )
    several = several or "\\sum" in text
    return bool(_CALL.fullmatch(text)) or bool(several and not re.search(r"\d", named))


def _names_one_value(text: str) -> bool:
    r"""Return whether the left side of a gold equation names its value: x, area, AB, f(2),
    ``\text{Area}``, x:y."""
    names = [name.strip() for name in text.split(":")]
    return all(
        not _NO_NAME.fullmatch(name)
        and any(known.fullmatch(name) for known in (_CALL, _LABEL, _SEGMENT))
        or _WORKED_OUT.search(name)
        for name in names
    )


def _same_relations(
    one: tuple[str, Parts | None, str], other: tuple[str, Parts | None, str], depth: int
) -> bool:
    """Compare two answers of which one at least is an equation or inequality."""
    (text, parts, kind), (text_too, parts_too, kind_too) = one, other
    if kind == kind_too == "=":
        return _same_equations(_relation(text)[0], _relation(text_too)[0], depth)
    if kind and kind_too and "=" in (kind, kind_too):
        return False
    if "=" in (kind, kind_too):
        sides, bare = (_relation(text)[0], text_too) if kind else (_relation(text_too)[0], text)
        sides = sides[::-1] if _LABEL.fullmatch(sides[-1]) else sides
        label = _is_label(sides[0], sides[-1]) if kind else _names_one_value(sides[0])
        values = sides[1:] if label else sides
        # X = y = 42
        values = values[1:] if label and len(values) > 1 and _LABEL.fullmatch(values[0]) else values
        alike = all(_same(value, values[-1], depth + 1) for value in values[:-1])
        return alike and (
            _same(values[-1], bare, depth + 1) if kind else _same(bare, values[-1], depth + 1)
        )
    if kind and kind_too:
        return _same_inequalities(_relation(text), _relation(text_too), depth)
    name, interval = _interval(*_relation(text if kind else text_too))
    parts = parts_too if kind else parts
    return interval is not None and parts is not None and _same_parts(interval, parts, depth + 1)


def _same_equations(one: list[str], other: list[str], depth: int) -> bool:
    """Compare two equations: by what their equal labels stand for, or as multiples of each
    other."""
    first, second = one[0], other[0]
    labels = all(_LABEL.fullmatch(side) for side in (first, second))
    named = labels and (
        _squeezed(first) == _squeezed(second) or any(map(_CALL.fullmatch, (first, second)))
    )
    if len(one) == len(other) == 2:
        # k=5 and n=5 give 5
        numbers = depth == 0 and labels and not re.search(r"[a-zA-Z]", one[1] + other[1])
        if named or numbers:
            return _same(one[1], other[1], depth + 1)
        return _by_value(ratio, _difference(one), _difference(other)) is not None
    return len(one) == len(other) and all(
        _same(a, b, depth + 1) for a, b in zip(one, other, strict=True)
    )


def _same_inequalities(
    one: tuple[list[str], list[str]], other: tuple[list[str], list[str]], depth: int
) -> bool:
    (name, interval), (name_too, interval_too) = _interval(*one), _interval(*other)
    if interval is not None and interval_too is not None:
        return name == name_too and _same_parts(interval, interval_too, depth + 1)
    if len(one[0]) != 2 or len(other[0]) != 2:
        return False
    factor = _by_value(ratio, _difference(one[0]), _difference(other[0]))
    if factor is None or abs(factor.imag) > abs(factor.real) * 1e-9:
        return False
    sign = other[1][0]
    return one[1][0] == (sign if factor.real > 0 else _FLIPPED.get(sign, sign))


def _difference(sides: Sequence[str]) -> str:
    return f"({sides[0]})-({sides[1]})"


def _interval(sides: list[str], operators: list[str]) -> tuple[str, Parts | None]:
    """Return the name and the interval of ``x<3``, ``3>x`` and ``1<x<=3``; None for another
    inequality."""
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
