"""Read LaTeX answers: the last box, and a formula as plain text.

Text goes in and text comes out: values are compared by :mod:`reward_scores.expressions`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CHARS = 2000
MAX_DEPTH = 50
_BRACE = re.compile(r"[{}]")
_TOKEN = re.compile(r"\\[a-zA-Z]+\s*|\\.|[{}$~]|[^\\{}$~]+", re.DOTALL)
_NAMES = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma
sigma tau upsilon phi chi psi omega
"""
GREEK = {name: ord("\u03b1") + at for at, name in enumerate(_NAMES.split())}
_FUNCTIONS = "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan ln log exp min max gcd"
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\^\{?\\circ\}?")  # degrees in an argument of sin, cos, tan
_SUBSCRIPT = re.compile(r"\\?([a-zA-Z]+)'*_(\{[^{}]*\}|\w)")
_PRIME = re.compile(r"[a-zA-Z]'+")
_SYMBOLS = {
    **{name: chr(code) for name, code in GREEK.items()},
    **{
        "pi": "pi",
        "infty": "inf",
        "cup": "U",
        "cdot": "*",
        "times": "*",
        "div": "/",
        "pm": "\u00b1",
    },
    **{"le": "<=", "leq": "<=", "ge": ">=", "geq": ">="},
    **{char: char for char in "{}%$&#_"},
    **dict.fromkeys([*" ,;:", "quad", "qquad"], " "),
    **{name: name for name in _FUNCTIONS.split()},
}


class NotLatex(ValueError):
    """The text is too long, too deeply nested, or not a formula."""


def closing_brace(text: str, start: int) -> int | None:
    """Return the place where the first group after ``start`` ends; None where it does not."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0 and brace.group() == "}":
            return brace.start()
    return None


def last_box(text: str, *openings: str) -> str | None:
    """Return the content of the last of these boxes (an opening ends in a brace); None where it is
    not closed."""
    start, opening = max(((text.rfind(opening), opening) for opening in openings), default=(-1, ""))
    if start < 0:
        return None
    end = closing_brace(text, start)
    return None if end is None else text[start + len(opening) : end]


@dataclass(frozen=True)
class Style:
    """The spelling of fractions and roots. ``powers`` puts the group behind ``^`` in parentheses.

    Where ``unknown_commands`` are let through, they vanish and their arguments stay.
    """

    fraction: str
    root: str
    powers: bool
    unknown_commands: bool


# As pylatexenc does: precedence and the index of a root are lost.
PLAIN = Style("{0}/{1}", "sqrt({1})", powers=False, unknown_commands=True)
EXACT = Style("(({0})/({1}))", "(({1})**(1/({0})))", powers=True, unknown_commands=False)


def to_text(latex: str, style: Style) -> str:
    r"""Return a formula as text: ``\frac{1}{2}\pi`` as ``1/2pi``.

    Raises NotLatex beyond MAX_CHARS characters or MAX_DEPTH nested groups, and for an unknown
    command.
    """
    if len(latex) > MAX_CHARS:
        raise NotLatex(f"longer than {MAX_CHARS} characters")
    return _group(_TOKEN.findall(latex)[::-1], style, 0).strip()


def formulas(*sides: str) -> list[str]:
    r"""Return formulas as text that :mod:`reward_scores.expressions` reads, with one letter for
    ``x_1`` in all of them.

    Raises NotLatex as :func:`to_text` does.
    """
    names: dict[str, str] = {}
    return [to_text(_for_values(side, names), EXACT) for side in sides]


def _for_values(text: str, names: dict[str, str]) -> str:
    """Rewrite what the reader of formulas does not know: bases of logarithms, inverse functions,
    degrees, indices."""
    text = re.sub(r"\\log ?_(\{[^{}]*\}|\w)", r"\\frac{1}{\\ln(\1)}\\ln ", text)
    text = re.sub(r"\\(sin|cos|tan) ?\^\{?-1\}?", r"\\arc\1", text)
    if re.search(r"\\(?:sin|cos|tan)", text):
        text = _ANGLE.sub(r"(\1\\pi/180)", text)
    text = re.sub(r"\|([^|]+)\|", r" abs(\1)", text)
    text = _SUBSCRIPT.sub(lambda found: _letter(found[0], names), text)
    return _PRIME.sub(lambda found: _letter(found[0], names), text)


def _letter(name: str, names: dict[str, str]) -> str:
    return f" {names.setdefault(re.sub('[{} ]', '', name), chr(0x4E00 + len(names)))} "


def _group(tokens: list[str], style: Style, depth: int) -> str:
    """Consume tokens (the next one is the last of the list) up to the brace that closes the
    group."""
    if depth > MAX_DEPTH:
        raise NotLatex(f"more than {MAX_DEPTH} nested groups")
    text = ""
    while tokens:
        if tokens[-1] == "}":
            tokens.pop()
            if depth:
                break
            continue  # closes nothing
        opens = tokens[-1] == "{"
        piece = _piece(tokens, style, depth)
        text += f"({piece})" if opens and style.powers and text.endswith("^") else piece
    return text


def _piece(tokens: list[str], style: Style, depth: int) -> str:
    token = tokens.pop()
    if token == "{":
        return _group(tokens, style, depth + 1)
    if not token.startswith("\\"):
        return {"$": "", "~": " "}.get(token, token)
    name = token[1:].strip() or token[1:]
    if name in ("frac", "dfrac", "tfrac"):
        return style.fraction.format(
            _argument(tokens, style, depth), _argument(tokens, style, depth)
        )
    if name in ("binom", "dbinom", "tbinom") and not style.unknown_commands:
        above = _argument(tokens, style, depth)
        below = _argument(tokens, style, depth)
        return f"(({above})!/(({below})!(({above})-({below}))!))"
    if name == "sqrt":
        index = _option(tokens)
        return style.root.format(index, _argument(tokens, style, depth))
    if name not in _SYMBOLS and not style.unknown_commands:
        raise NotLatex(f"\\{name} is no part of a formula here")
    symbol = _SYMBOLS.get(name, "")
    return f" {symbol} " if symbol.isalpha() and not style.unknown_commands else symbol


def _argument(tokens: list[str], style: Style, depth: int) -> str:
    """Consume and return the next group, command or character."""
    while tokens and tokens[-1].isspace():
        tokens.pop()
    if not tokens or tokens[-1] == "}":
        return ""
    if tokens[-1][0] in "\\{$~":
        return _piece(tokens, style, depth + 1)
    text = tokens.pop().lstrip()
    if text[1:]:
        tokens.append(text[1:])
    return text[0]


def _option(tokens: list[str]) -> str:
    """Consume and return the index of a root in brackets, 2 where there is none."""
    found = re.match(r"\s*\[([^\]]*)\]", tokens[-1]) if tokens else None
    if found is None:
        return "2"
    rest = tokens.pop()[found.end() :]
    if rest:
        tokens.append(rest)
    return found[1]
