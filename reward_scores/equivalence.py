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

import re
from collections.abc import Callable, Sequence

from reward_scores.answer_structure import (
    CALL,
    FLIPPED,
    LABEL,
    Parts,
    Relation,
    interval_of,
    is_label,
    named_values,
    names_one_value,
    parts_of,
    relation_of,
    split,
    squeezed,
    without_separators,
)
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
APPROX = re.compile(r"\\approx(?![a-zA-Z]) ?")
# (x,y) = in front of tuples
NAMES = re.compile(r"^\([a-zA-Z]\w?(?:, ?[a-zA-Z]\w?)+\) ?= ?(?=[(\[{\\])")
# Brackets without an order, and kinds that may equal each other: 1, 2 is {1, 2}
UNORDERED = {"": "", "{": "", "union": "", "and": "and"}


def equivalent(answer: str, gold: str) -> bool:
    """Return whether an answer equals the gold one as text, number, formula, or part by part.

    What is nothing but layout equals nothing.
    """
    answer = normal(answer)
    gold = normal(gold)
    have_words = bool(re.search(r"\w", answer)) and bool(re.search(r"\w", gold))
    if not have_words or max(len(answer), len(gold)) > MAX_CHARS:
        return answer == gold and bool(re.search(r"\w", answer))
    if choice(gold, alone=True):
        answer = re.sub(r"^\(([a-j])\)$", lambda match: match[0].upper(), answer)
    if choice(answer, alone=True) or choice(gold, alone=True):
        return answer == gold or choice(answer) == choice(gold)
    answer, modulus = split_modulus(answer)
    gold, gold_modulus = split_modulus(gold)
    if gold_modulus and modulus != gold_modulus:
        return False
    if modulus and gold_modulus and _same_residue(answer, gold, modulus):
        return True
    readings = _readings(number_of_base(answer))
    gold_readings = _readings(number_of_base(gold))
    return any(_same(one, other, 0) for one in readings for other in gold_readings)


def _readings(text: str) -> list[str]:
    r"""Return the text, or the exact value in front of ``\approx``.

    What follows the sign is another reading where it rounds the value.
    """
    exact, *rounded = split(text, APPROX, empty=True) or [text]
    if not rounded:
        return [text]
    approximation = rounded[-1]
    value = relation_of(exact).sides[-1]
    if not exact or LABEL.fullmatch(value):
        return [approximation]
    size = _by_value(lambda formula, _: number(formula), value, "")
    rounded_size = _by_value(lambda formula, _: number(formula), approximation, "")
    digits = re.search(r"\.(\d+)", approximation)
    step = 10.0 ** -len(digits[1] if digits else "")
    are_numbers = size is not None and rounded_size is not None
    is_rounded = are_numbers and abs(size - rounded_size) <= 0.5000001 * step
    return [exact, approximation] if is_rounded else [exact]


def _same_residue(answer: str, gold: str, modulus: str) -> bool:
    """Compare two whole numbers, each alone or behind one name and a sign of congruence."""
    pattern = r"(?:[a-zA-Z] ?(?:\\equiv|=) ?)?(-?\d{1,30})"
    residue = re.fullmatch(pattern, answer)
    gold_residue = re.fullmatch(pattern, gold)
    if not (residue and gold_residue and re.fullmatch(r"[1-9]\d{0,30}", modulus)):
        return False
    return (int(residue[1]) - int(gold_residue[1])) % int(modulus) == 0


def cleaned(answer: str) -> str:
    """Return the answer without layout, words that do not change its value, and ``x =``.

    Its unit has one spelling.
    """
    text = normal(answer)
    if len(text) > MAX_CHARS:
        return text
    text, modulus = split_modulus(text)
    value, unit = split_unit(text)
    relation = relation_of(value)
    if relation.operators == ["="] and is_label(*relation.sides):
        value = relation.sides[1]
    if unit:
        value += "\\%" if unit == "%" else f" {unit}"
    return value + (f" mod {modulus}" if modulus else "")


def _same(answer: str, gold: str, depth: int) -> bool:
    """Compare two answers of any kind. ``depth`` is that of the tuples around them."""
    if squeezed(answer) == squeezed(gold):
        return True
    if depth > MAX_DEPTH:
        return False
    answer = NAMES.sub("", answer)
    gold = NAMES.sub("", gold)
    parts = parts_of(answer)
    gold_parts = parts_of(gold)
    if parts and gold_parts:
        return _same_parts(parts, gold_parts, depth + 1)
    relation = relation_of(answer)
    gold_relation = relation_of(gold)
    if relation.operators or gold_relation.operators:
        if relation.kind and gold_relation.kind:
            return _same_relations(relation, gold_relation, depth)
        if gold_relation.kind == "=":
            return _same_as_equation(answer, gold_relation, depth)
        if relation.kind == "=":
            return _names_the_same(relation, gold, depth)
        inequality = relation if relation.kind else gold_relation
        others = gold_parts if relation.kind else parts
        interval = interval_of(inequality)[1]
        return bool(interval and others and _same_parts(interval, others, depth + 1))
    if parts or gold_parts:  # {42} is 42
        single = parts or gold_parts
        if single.opened != "{" or len(single.elements) != 1:
            return False
        (element,) = single.elements
        pair = (element, gold) if parts else (answer, element)
        return _same(*pair, depth + 1)
    return _same_quantities(answer, gold)


def _same_quantities(answer: str, gold: str) -> bool:
    """Compare two values that may have units."""
    value, unit = split_unit(answer)
    gold_value, gold_unit = split_unit(gold)
    if unit and gold_unit:
        # The power alone means square or cubic units of any length
        is_power = unit[0] == "^" and gold_unit.endswith(unit)
        is_power = is_power or (gold_unit[0] == "^" and unit.endswith(gold_unit))
        return (unit == gold_unit or is_power) and _same_values(value, gold_value)
    if unit == "%":
        return _same_percent(value, gold_value)
    if gold_unit == "%":
        return _same_percent(gold_value, value)
    return _same_values(value, gold_value)


def _same_values(answer: str, gold: str) -> bool:
    """Compare two values as words, as formulas, and as ratios."""
    subscript = r"(?<=[a-zA-Z])_(?:\{(\d+)\}|(?=\d))"  # H_2O is H2O
    words = re.sub(subscript, r"\1", plain_words(answer))
    gold_words = re.sub(subscript, r"\1", plain_words(gold))
    if squeezed(words) == squeezed(gold_words):
        return True
    if len(words) > 2 and squeezed(words).casefold() == squeezed(gold_words).casefold():
        return True
    return _by_value(same_value, answer, gold) is True or _same_ratio(answer, gold)


def _by_value(compare: Callable[[str, str], object], one: str, other: str) -> object:
    """Compare two formulas by a function of :mod:`reward_scores.expressions`.

    None where one is no formula.
    """
    if "\\text" in one or "\\text" in other:  # words are no formula
        return None
    try:
        return compare(*formulas(without_separators(mixed(one)), without_separators(mixed(other))))
    except NotLatex:
        return None


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


def _same_ratio(answer: str, gold: str) -> bool:
    """Compare 1:2:3 with 2:4:6; 12:00 is a time and is compared as text."""
    terms = answer.split(":")
    gold_terms = gold.split(":")
    if len(terms) != len(gold_terms) or len(terms) < 2:
        return False
    if any(re.fullmatch(r"\d+:\d\d", text) for text in (answer, gold)):
        return False
    for term, gold_term in zip(terms[1:], gold_terms[1:], strict=True):
        products = f"({term})({gold_terms[0]})", f"({gold_term})({terms[0]})"
        if _by_value(same_value, *products) is not True:
            return False
    return True


def _same_parts(answer: Parts, gold: Parts, depth: int) -> bool:
    """Compare tuples, sets, matrices and unions element by element."""
    if {answer.opened, gold.opened} == {"", "("}:  # x=1, y=2 and (1,2)
        values = named_values(answer.elements)
        gold_values = named_values(gold.elements)
        if values is None and gold_values is None:
            return False
        tuples = Parts("(", values or answer.elements, ")")
        gold_tuples = Parts("(", gold_values or gold.elements, ")")
        return _same_parts(tuples, gold_tuples, depth)
    if answer.opened not in UNORDERED:
        brackets = answer.opened, answer.closed
        if brackets != (gold.opened, gold.closed):
            return False
        return _same_in_order(answer.elements, gold.elements, depth)
    if UNORDERED[answer.opened] != UNORDERED.get(gold.opened):
        return False
    elements = _without_copies(answer)
    left = _without_copies(gold)
    if len(elements) > MAX_UNORDERED:
        return _same_in_order(elements, left, depth)
    if len(elements) != len(left):
        return False
    for element in elements:
        match = next((candidate for candidate in left if _same(element, candidate, depth)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_in_order(elements: Sequence[str], golds: Sequence[str], depth: int) -> bool:
    if len(elements) != len(golds):
        return False
    pairs = zip(elements, golds, strict=True)
    return all(_same(element, gold, depth) for element, gold in pairs)


def _without_copies(parts: Parts) -> list[str]:
    """Return a set's elements, or the tuples of a list, each once.

    As solutions of a problem, twice is once.
    """
    are_tuples = all(element[:1] == "(" for element in parts.elements)
    if parts.opened == "{" or (parts.opened == "" and are_tuples):
        return list(dict.fromkeys(map(squeezed, parts.elements)))
    return list(parts.elements)


# -- equations and inequalities --------------------------------------------------------------------


def _same_as_equation(answer: str, gold: Relation, depth: int) -> bool:
    """Compare a bare answer with a gold equation, whose name may be missing."""
    sides = gold.sides[::-1] if LABEL.fullmatch(gold.sides[-1]) else gold.sides
    value = _named_value(sides, names_one_value(sides[0]), depth)
    return value is not None and _same(answer, value, depth + 1)


def _names_the_same(answer: Relation, gold: str, depth: int) -> bool:
    """Compare an equation with a bare gold answer, which it may name."""
    sides = answer.sides[::-1] if LABEL.fullmatch(answer.sides[-1]) else answer.sides
    value = _named_value(sides, is_label(sides[0], sides[-1]), depth)
    return value is not None and _same(value, gold, depth + 1)


def _named_value(sides: list[str], has_label: bool, depth: int) -> str | None:
    """Return what all sides but the names are equal to; None where they are not equal."""
    values = sides[1:] if has_label else sides
    if has_label and len(values) > 1 and LABEL.fullmatch(values[0]):  # X = y = 42
        values = values[1:]
    *others, value = values
    return value if all(_same(other, value, depth + 1) for other in others) else None


def _same_relations(answer: Relation, gold: Relation, depth: int) -> bool:
    """Compare two equations, or two inequalities."""
    if "=" in (answer.kind, gold.kind):
        return answer.kind == gold.kind and _same_equations(answer.sides, gold.sides, depth)
    name, interval = interval_of(answer)
    gold_name, gold_interval = interval_of(gold)
    if interval is not None and gold_interval is not None:
        return name == gold_name and _same_parts(interval, gold_interval, depth + 1)
    if len(answer.sides) != 2 or len(gold.sides) != 2:
        return False
    factor = _by_value(ratio, _difference(answer.sides), _difference(gold.sides))
    if factor is None or abs(factor.imag) > abs(factor.real) * 1e-9:
        return False
    (sign,) = gold.operators
    return answer.operators[0] == (sign if factor.real > 0 else FLIPPED.get(sign, sign))


def _same_equations(answer: list[str], gold: list[str], depth: int) -> bool:
    """Compare equations by what equal labels stand for, or as multiples of each other."""
    if not len(answer) == len(gold) == 2:
        return _same_in_order(answer, gold, depth + 1)
    labels = (answer[0], gold[0])
    if all(map(LABEL.fullmatch, labels)):
        same_label = squeezed(answer[0]) == squeezed(gold[0]) or any(map(CALL.fullmatch, labels))
        # k=5 and n=5 give 5
        are_numbers = depth == 0 and not re.search(r"[a-zA-Z]", answer[1] + gold[1])
        if same_label or are_numbers:
            return _same(answer[1], gold[1], depth + 1)
    return _by_value(ratio, _difference(answer), _difference(gold)) is not None


def _difference(sides: Sequence[str]) -> str:
    return f"({sides[0]})-({sides[1]})"
