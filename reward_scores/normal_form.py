"""Write an answer in one spelling: without layout, units, labels and words that do not change its
value.

Text goes in and text comes out. :mod:`reward_scores.equivalence` compares what is left.
"""

from __future__ import annotations

import re

from reward_scores.typography import to_latex

MAX_CHARS = 2000  # longer answers are compared as they stand
_TEXT = r"\\(?:text(?:normal|rm|bf|it|sf|tt|up)?|[mh]box|math(?:rm|bf|it|sf)|operatorname|emph)"
_WORD_AND = rf"(?:{_TEXT}\{{\s*,?\s*(?:and|or)\s*\}}|(?<=[\s\d}})])(?:and|or)(?=\s))"
_THOUSANDS = re.compile(r"(?<=\d)(?:\{\\?,\}(?: |\\[!,; ])*|, ?\\! ?)(?=\d{3}(?!\d))")
_LAYOUT = re.compile(
    r"\\(?:left|right|middle|displaystyle|textstyle|limits|[bB]igg?[lrm]?|[lL]arge|bf|rm|it)(?![a-zA-Z])"
    r"|(?<!\\)\\(?:[!,;: ]|q?quad)|[$`~]|\\[()\[\]](?!\d*pt)|\\(?:tag|hspace|phantom)\*? "
    r"?\{[^{}]*\}"
    r"|(?<![\w)}\]])\*\*|\*\*(?![\w(\\{.+-])|\\\\$"
)
_DECORATED = re.compile(
    r"\\(?:vec|overrightarrow|underline|bm|boldsymbol|(?:text)?color\{\w+\})(?![a-zA-Z]) "
    r"?(?:\{([^{}]*)\}|(\w))"
)
_PER_CENT = r"(?:per ?cent(?:age)?(?: points?)?|pct\.?)"
_PERCENT = re.compile(
    rf"\s*(?:\\?%|{_TEXT}\{{\s*(?:{_PER_CENT}|\\?%)\s*\}}|(?<=\d) "
    rf"{_PER_CENT}(?!\w))"
)
# X \in (1,2) is (1,2)
_MEMBER = re.compile(r"^(?:[a-zA-Z]|\([a-zA-Z](?:, ?[a-zA-Z])+\)) ?\\in(?![a-zA-Z]) ?")
_ABOUT = re.compile(
    rf"^(?:{_TEXT}\{{)?\s*(?:approximately|approx\.?|about|roughly|around)\s*\}}?\s*(?=[-\d.\\$])",
    re.I,
)
_INFINITY = re.compile(
    rf"{_TEXT}\{{\s*infinity\s*\}}|(?<![a-zA-Z\\])(?:[iI]nfinity|inf)(?![a-zA-Z])"
)
_STACKED = re.compile(r"\{([^{}]*)\\(over|choose)(?![a-z])([^{}]*)\}")  # {1 \over 2}
_CASES = re.compile(r"\\begin\{cases\}([^&]*?)(?:\\\\)?\s*\\end\{cases\}")
_REALS = re.compile(
    r"(?:all|the set of(?: all)?)?\s*real(?: numbers?|s)|\\mathbb\{?R\}?|\\mathbb "
    r"R|\\R",
    re.I,
)
# { x : x < 3 } is x < 3
_IN = r" ?\\in ?\\mathbb ?"
_DESCRIBED = re.compile(rf"\\\{{ ?[a-zA-Z](?:{_IN}\{{?R\}}?)? ?(?:\\mid|\\vert|\||:) ?(.*)\\\}}")
# x > 1, x in R; k pi (k in Z)
_FOR_ALL = re.compile(
    rf"\s*,?\s*{_TEXT}\{{\s*,?\s*(?:for (?:all|any|every|some)|where)\b.*$"
    rf"|(?<=\S)\s*[,(]\s*(?:[a-zA-Z]{_IN}\{{?R\}}?|[klmn]{_IN}\{{?[ZN]\}}?)\s*\)?$"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar) ?\{?(\d+)\}?")
_OPEN_INTERVAL = re.compile(r"([\]\[])([^\[\](){}]*,[^\[\](){}]*)([\]\[])")
_WITHOUT = re.compile(
    r"(?:\\mathbb ?\{?R\}?|\(-\\infty, ?\\infty\)) ?\\(?:setminus|backslash) "
    r"?\\\{([-\d., ]+)\\\}"
)
_SPELLINGS = """\\emptyset varnothing;\\ldots dots cdots dotsc dotsb;| lvert rvert vert;
\\frac cfrac dfrac tfrac nicefrac sfrac;\\ne neq;\\approx simeq approxeq doteq thickapprox;
( lparen langle;) rparen rangle;[ lbrack;] rbrack;\\{ lbrace;\\} rbrace;\\tan tg;\\cot ctg;
\\arctan arctg;\u20ac euro texteuro;\u00a3 pounds textsterling;\\$ textdollar;^\\circ textdegree"""
_SPELLED = {name: one for one, *names in map(str.split, _SPELLINGS.split(";")) for name in names}
_COMMAND = re.compile(rf"\\({'|'.join(_SPELLED)})(?![a-zA-Z])")
_NAMED = {"dne": "does not exist", "no solutions": "no solution", "none": "no solution"}

# --- units ---

_SIGNS = "\u20ac\u00a3\u00a5\u20b9\u00a2"
_FRONT = re.compile(
    rf"(-?)\s*(\\\$|[{_SIGNS}]|{_TEXT}\{{\s*(?:\\?\$|USD|[{_SIGNS}])\s*\}})\s*(?=[-\d.\\])"
)
_SHORT = (
    "mm|cm|dm|km|mg|kg|ml|mL|ft|in|yd|mi|lb|lbs|oz|hr|hrs|sq|am|pm|AM|PM|Hz|kHz|kW|kJ|mph|rad|deg"
)
_NOT_UNITS = (
    r"(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi|and|or|mod|inf|infty|infinity|st|nd|rd|th|times"
    r"|factorial|squared|cubed|dozen|halves|thirds|over|plus|minus|choose|divided|less|below)\b)"
)
_POWER = r"(?:\s*\^\{?[23]\}?)?"
_WORDS = (
    rf"\s{_NOT_UNITS}(?:[a-zA-Z]{{3,}}|{_SHORT}|[mgshLNJWV](?=/|$|\^))(?:[ "
    rf"/][a-zA-Z]+)*{_POWER}"
)
_BEHIND = re.compile(
    rf"\s*(?:(?:{_TEXT}\{{\s*+{_NOT_UNITS}(?![^{{}}]*=)[^{{}}\d]*(?:\^[23][^{{}}\d]*)?\}}{_POWER}"
    rf"\s*[/\\ ]*)+"
    rf"|\^\{{?\\circ\}}?\s*(?:{_TEXT}\{{\s*)?[CF]?\}}?|\\degree|\\%|(?<=\d)(?:{_SHORT}){_POWER}|{_WORDS}"
    rf"|(?:\\\$|[{_SIGNS}]))$"
)
# Units, each with other names; a plural's s is dropped before
_UNITS = """$ dollar usd;\u20ac euro eur;\u00a3 gbp;cent cents \u00a2;deg degree;
degc degreescelsius degreecelsiu;rad radian;in inche inch;ft foot feet;yd yard;mi mile;
lb pound lbs;oz ounce;h hour hr;min minute;s second sec;m meter metre;cm centimeter centimetre;
mm millimeter millimetre;km kilometer kilometre;g gram;kg kilogram;l liter litre;mi/h mph;
km/h kph kmh"""
_UNIT_NAMES = {
    "unit": "",
    **{name: one for one, *names in map(str.split, _UNITS.split(";")) for name in names},
}
_WORDS_OF_BASES = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
_BASES = _WORDS_OF_BASES.split()
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=\d)\s*(?:{_TEXT}\{{\s*)?({'|'.join(_SCALES)})s?\b(?:\s*\}})?")


def normal(answer: str) -> str:
    """Return the answer in one spelling, with its unit."""
    if len(answer) > MAX_CHARS:
        return answer.strip()
    text = _THOUSANDS.sub("", to_latex(answer).replace("\\\\%", "\\%").replace("!=", "\\ne "))
    text = re.sub(r"\\\\(?=text|mathrm|frac|dfrac|sqrt)", r"\\", text)
    text = text.replace("\\$", "\ue000")  # the sign of a currency is no border of mathematics
    spaces = ("\\ ", "\\,", "\\;", "\\:", "~", "\\quad", "\\qquad")
    text = _LAYOUT.sub(lambda found: " " if found[0] in spaces else "", text)
    text = _COMMAND.sub(lambda found: _SPELLED[found[1]], text.replace("\ue000", "\\$")).strip()
    text = _DECORATED.sub(lambda found: found[1] or found[2] or "", text)
    text = re.sub(r"(\.\d+)\s*\.{3}", r"\1\\ldots", text)  # 0.333... is not 0.333
    while text.endswith((".", ",")) and text.rstrip(".,").rstrip():
        text = text[:-1].rstrip()
    # \text{5 apples}
    text = re.sub(rf"{_TEXT}\{{\s*(?=[-\d.,]+(?:\s+[a-zA-Z]|\s*\}}))([^{{}}]*)\}}", r"\1", text)
    text = _ABOUT.sub(r"\\approx ", _INFINITY.sub(r"\\infty ", text))
    text = _STACKED.sub(
        lambda found: f"\\{'frac' if found[2] == 'over' else 'binom'}{{{found[1]}}}{{{found[3]}}}",
        text,
    )
    text = (
        _CASES.sub(lambda found: found[1].replace("\\\\", ","), text)
        .rpartition("\\implies")[2]
        .strip()
    )
    text = _SCALE.sub(lambda found: f"\\times 10^{_SCALES[found[1]]}", _PERCENT.sub(r"\\%", text))
    text = re.sub(r"([\^_])\{([^\W_])\}(?!\w)", r"\1\2", text)
    text = re.sub(r"(?<![\w)}\]])\+\s*(?=\\infty)", "", text)
    text = re.sub(
        r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])", lambda found: found[0].replace(" ", ""), text
    )
    text = _REPEATING.sub(_fraction, _MEMBER.sub("", _FOR_ALL.sub("", text)))
    text = re.sub(rf",\s*(?={_WORD_AND})", " ", text)
    text = re.sub(r"\\\{\s*\\\}", r"\\emptyset", text)
    if _REALS.fullmatch(plain_words(text)):
        return "(-\\infty,\\infty)"
    if (described := _DESCRIBED.fullmatch(text)) is not None:
        text = described[1]
    if (interval := _OPEN_INTERVAL.fullmatch(text)) is not None:
        text = (
            f"{'(' if interval[1] == ']' else '['}{interval[2]}{')' if interval[3] == '[' else ']'}"
        )
    if (without := _WITHOUT.fullmatch(text)) is not None:
        text = _gaps(without[1])
    text = " ".join(text.split())
    return _NAMED.get(plain_words(text).casefold(), text)


def _fraction(found: re.Match[str]) -> str:
    r"""Return ``0.1\overline{6}`` as a fraction."""
    whole, once, again = found.groups()
    above = int(whole + once + again) - int(whole + once or "0")
    return f"\\frac{{{above}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}"


def _gaps(points: str) -> str:
    r"""Return all numbers but these as a union of intervals."""
    ends = ["-\\infty", *sorted((each.strip() for each in points.split(",")), key=float), "\\infty"]
    return "\\cup".join(f"({low},{high})" for low, high in zip(ends, ends[1:], strict=False))


def plain_words(text: str) -> str:
    r"""Return the content of ``\text{...}`` and the like without the marks."""
    return re.sub(rf"{_TEXT}\{{([^{{}}]*)\}}", r"\1", text).strip()


def split_unit(text: str) -> tuple[str, str]:
    r"""Return a value and its unit, in one spelling; no unit is "". ``5\text{th}`` has none: it is
    not 5."""
    if (front := _FRONT.match(text)) is not None:
        sign = front[2]
        rest = (front[1] + text[front.end() :]).strip()
        return rest, "$" if "$" in sign or "USD" in sign else sign
    # An angle's degrees are part of its value
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text):
        return text, ""
    found = _BEHIND.search(text)
    if found is None or not re.search(r"\d|\\pi", text[: found.start()]):
        return text, ""
    return text[: found.start()].strip(), _unit_name(found[0])


def _unit_name(text: str) -> str:
    name = re.sub(r"[\s{}\\]|\btext|mathrm|mbox", "", plain_words(text)).replace("^circ", "deg")
    if name in ("%", "degree"):
        return {"degree": "deg"}.get(name, name)
    power = (
        "^2"
        if re.search("sq(?:uare)?|\\^2", name)
        else "^3"
        if re.search("cu(?:bic)|\\^3", name)
        else ""
    )
    parts = re.split(
        "/|per", re.sub("square[ds]?|sq\\.?|cubi?c|cubed|\\^[23]", "", name.casefold())
    )
    singular = [part if len(part) < 3 else part.removesuffix("s") for part in parts]
    return "/".join(_UNIT_NAMES.get(part, part) for part in singular) + power


def split_modulus(text: str) -> tuple[str, str]:
    r"""Return a value and what it is taken modulo: ``42 \pmod{100}``."""
    found = re.search(
        r"\s*,?\s*(?:\\pmod|\(?\s*(?:\\?b?mod(?![a-z])|\\text\{\s*mod(?:ulo)?\s*\}))\s*\{?(\w+)\}?\)?$",
        text,
    )
    return (text, "") if found is None else (text[: found.start()].strip(), found[1])


def choice(text: str, alone: bool = False) -> str | None:
    r"""Return the letter of a choice: E, (E), ``\text{(E)}``, E), ``\textbf{(E) } 12``; None for
    anything else.

    ``alone``: nothing but the letter may be there.
    """
    words = re.sub(
        r"^(?:option|choice|answer)\s+",
        "",
        " ".join(plain_words(text).split()),
        flags=re.IGNORECASE,
    )
    pure = re.fullmatch(r"\(?([A-J])\)?[.:]?", words)
    if pure is None and not alone:
        pure = re.fullmatch(r"(?:\(([A-J])\)|([A-J])(?:[):]|\.(?= )))\s*(?!.*\([A-J]\)).+", words)
    return None if pure is None else next(filter(None, pure.groups()))


def number_of_base(text: str) -> str:
    r"""Write the base of a number in digits: ``2516_{\text{eight}}`` is ``2516_8``."""
    found = re.fullmatch(rf"\(?(\w+)\)?_\{{?(?:{_TEXT}\{{)?([a-z]+)\}}*", text)
    return f"{found[1]}_{_BASES.index(found[2]) + 2}" if found and found[2] in _BASES else text
