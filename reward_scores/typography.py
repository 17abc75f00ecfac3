"""Rewrite typographic characters as LaTeX or ASCII of the same value.

NFKC does not do that: it reads 5\u00b2 as 52, 2\u00bd as 21/2 and 10\u207b\u00b3 as 10-3. Here a
superscript becomes an exponent, a vulgar fraction a fraction, every dash a minus sign, and digits
of any script become ASCII.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import groupby

from reward_scores.latex import GREEK, closing_brace

MAX_ROOTS = 20  # signs of roots that are read; each one scans the text behind it
_ROOTS = {"\u221a": "\\sqrt", "\u221b": "\\sqrt[3]", "\u221c": "\\sqrt[4]"}
_FRACTION_SLASH = "\u2044"
_COMMAND_NAMES = """
\u00d7 times \u00f7 div \u2715 times \u2a2f times \u00b1 pm \u2213 mp \u221e infty \u2260 ne
\u2248 approx \u223c sim \uff5e sim \u301c sim \u2264 le \u2265 ge \u2a7d le \u2a7e ge \u2266 le
\u2267 ge \u222a cup \u2229 cap \u2208 in \u2205 emptyset \u2192 to \u2220 angle \u27e8 langle
\u27e9 rangle \u2026 ldots \u22ef cdots \u2228 lor \u2227 land \u2102 mathbb{C} \u2115 mathbb{N}
\u211a mathbb{Q} \u211d mathbb{R} \u2124 mathbb{Z}
"""
_SIGNS_AND_NAMES = _COMMAND_NAMES.split()
_COMMANDS = {
    **{chr(code): name for name, code in GREEK.items()},
    **dict(zip(_SIGNS_AND_NAMES[::2], _SIGNS_AND_NAMES[1::2], strict=True)),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2022\u2062\u30fb", "cdot"),
}
_TYPOGRAPHIC = (
    "\u2212\u02d7\u2217\u2215\u2236\u2223\u2032\u2018\u2019\u3002\u066a\u066b\u2063\u2064"
)
_PLAIN = {
    # The second is an ordinal sign, which people type as a degree
    **dict.fromkeys("\u00b0\u00ba\u02da", "^\\circ "),
    **dict(zip(_TYPOGRAPHIC, "--*/:|'''.%.,+", strict=True)),
}
# Separators of thousands: spaces that do not break a line, thin ones, apostrophes, the Arabic sign
_GROUPED = re.compile(
    r"(?<![\d.,])\d{1,3}(?:([\u00a0\u2005-\u2009\u202f\u2019\u066c])\d{3})(?:\1\d{3})*(?!\d)(?:[.,\u066b]\d+)?"
)
_STACKED = re.compile(
    rf"\^\{{(\d+)\}}\s*[/{_FRACTION_SLASH}]\s*_\{{(\d+)\}}|(\d+)\s*{_FRACTION_SLASH}\s*(\d+)"
)
_INDEXED = re.compile(r"(?<![\w)}\]])\^\{(\d)\}\\sqrt\{")  # a small 3 in front of a root's sign
_RADICAND = re.compile(r"\d+(?:\.\d+)?|\\frac\{[^{}]*\}\{[^{}]*\}|\\(?!sqrt)[a-zA-Z]+|[^\W\d_]")


def to_latex(text: str) -> str:
    r"""Return the text with LaTeX or ASCII of the same value for typographic characters:
    ``2\frac{1}{2}`` for 2\u00bd.

    ASCII stays as it is.
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFC", text)
    text = _GROUPED.sub(lambda found: found[0].replace(found[1], ""), text)
    latex = ""
    for shift, run in groupby(text, _shift):
        inner = "".join(map(_plain, run))
        if not shift:
            latex += inner
        else:  # behind ^ or ^{ the sign of the exponent is there already
            latex += (
                f"{{{inner}}}" if latex.endswith(("^", "_", "^{", "_{")) else f"{shift}{{{inner}}}"
            )
    latex = _STACKED.sub(
        lambda found: f"\\frac{{{found[1] or found[3]}}}{{{found[2] or found[4]}}}", latex
    )
    return _roots(latex.replace(_FRACTION_SLASH, "/"))


@cache
def _shift(char: str) -> str:
    """Return ``^`` for a superscript and ``_`` for a subscript."""
    if char in _PLAIN:
        return ""
    return {"<super>": "^", "<sub>": "_"}.get(unicodedata.decomposition(char).partition(" ")[0], "")


@cache
def _plain(char: str) -> str:
    """Return what one character becomes, without the mark of a superscript or subscript."""
    if char.isascii() or char in _ROOTS or char == _FRACTION_SLASH:
        return char
    if char in _PLAIN:
        return _PLAIN[char]
    if char in _COMMANDS:
        return f"\\{_COMMANDS[char]} "
    category = unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category in ("Pd", "Zs"):
        return "-" if category == "Pd" else " "
    # invisible: joiners, marks of direction, variants
    if category == "Cf" or "\ufe00" <= char <= "\ufe0f":
        return ""
    kind, *codes = unicodedata.decomposition(char).split() or [""]
    if not kind.startswith("<"):  # a letter with its accent, and what has no simpler form
        digit = unicodedata.digit(char, None)
        return char if digit is None else f" {digit} "  # white on a black circle
    parts = "".join(chr(int(code, 16)) for code in codes)
    if kind == "<fraction>" and not parts.endswith(_FRACTION_SLASH):
        return "\\frac{{{}}}{{{}}}".format(*parts.split(_FRACTION_SLASH))
    found = "".join(map(_plain, parts)) if kind in ("<super>", "<sub>") else to_latex(parts)
    return f" {found} " if kind == "<circle>" else found  # 1 and a circled 1 are not 11


def _roots(text: str) -> str:
    """Write the signs of roots as commands, the last one first, so that an inner root is the
    argument of an outer."""
    places = [at for at, char in enumerate(text) if char in _ROOTS]
    if len(places) > MAX_ROOTS:
        return text
    for at in reversed(places):
        rest = text[at + 1 :].lstrip()
        argument, end = _radicand(rest)
        text = f"{text[:at]}{_ROOTS[text[at]]}{{{argument}}}{rest[end:]}"
    return _INDEXED.sub(r"\\sqrt[\1]{", text)


def _radicand(text: str) -> tuple[str, int]:
    """Return what stands under a root, and where it ends in the text behind the sign."""
    if text.startswith(("{", "\\sqrt")):
        end = closing_brace(text, 0)
        if end is not None:
            return (text[1:end] if text[0] == "{" else text[: end + 1]), end + 1
    if text.startswith("("):
        depth = 0
        for at, char in enumerate(text):
            depth += (char == "(") - (char == ")")
            if not depth:
                return text[1:at], at + 1
    found = _RADICAND.match(text)
    return (found[0], found.end()) if found else ("", 0)
