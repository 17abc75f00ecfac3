"""Find the answer in a response: in its boxes, behind "Answer:", in ``<answer>``, or behind "the
answer is".

The ``robust`` and ``math_verify`` variants of the mathematics scorers read a response by this;
published variants have their own rules.
"""

from __future__ import annotations

import re

from reward_scores.latex import closing_brace
from reward_scores.tags import between

# From the end, that are looked at for a closed one, or one with something behind it
MAX_BOXES = MAX_MARKS = 20
MAX_LINE = 2000  # characters of a line that is read
# \x08 is what a text's \b becomes by mistake
_BOXED = re.compile(r"(?:\\b|\x08)oxed\s*(\{|(?<=\s)[^\s${}]+)")
_FRAMED = re.compile(r"\\(?:fbox|framebox)\s*(\{)")
# In front of a box: x_1 =
_NAME = re.compile(r"(?:\\?[a-zA-Z]\w*(?:_\{\w+\})?(?:\(\w+\))?|\([a-z, ]+\)) ?= ?$")
_SPACE = re.compile(r"\\q?quad(?![a-zA-Z])|\\[\\ ,;:!()\[\]]|[\s$~*]+")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textrm)\s*\{([^{}]*)\}")
_JOINED = re.compile(r"(?:[,;&]|and|or|as well as|along with|together with| )*")
_HEAD = r"answers?[*_ ]*[:\uff1a=][*_ ]*|\u7b54\u6848[*_ ]*[:\uff1a]"
_ANSWER = re.compile(
    rf"(?im)(^[^\w\n]*(?:the )?(?:final |correct "
    rf")?)?(?:{_HEAD})|(^[^\w\n]*(?:final )?answer)[*_ ]*$"
)
_SAID = re.compile(
    r"(?i)\banswers?(?: to [^.:\n]{1,80}?)? (?:is|are)\b[:\s]*|^\W*answer "
    r"(?=\\\(.*\\\)|\$.*\$)"
)
_DISPLAYED = re.compile(r"(\$\$|\\\[)(.+?)(?:\$\$|\\\])", re.DOTALL)
_END = re.compile(r"(?:<\|[^|<>]*\|>|</answer>|\bI hope (?:it|this) is correct\b[.!]?|\s)+$")
_MATH = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_VERB = re.compile(
    r"\b(?:is|are|be|equals?|gives?|has|have|get|was|were)\b:?(?: (?:equal "
    r"to|exactly|only|just|a|an|the))* ?"
)
_VALUE = re.compile(
    r"[A-J](?:[.)]?$|,? (?:because|since|as|is (?:right|correct|true))\b)"
    r"|[-+$\\(\[{.\d\u2212\u221a\u03c0\u00b1\u20ac\u00a3]"
)
# John needs 34 apples
_SENTENCE = re.compile(r"(?:It|He|She|They|We|[A-Z][a-z]+) (?:will |can |must )?[a-z]+ ")
# **42**. and the end of **The answer is 42**, and not 2**.5
_BOLD = re.compile(
    r"^(?:\*\*?|__)(?=\S)|(?<=[\w)}\]%$])(?:\*\*?|__)(?![\s]*[\d(\\])(?=[\s,;:!)]|\.(?!\d)|$)"
)
_REASON = re.compile(
    r"[,;.]? +(?:for|when|whenever|if|where|since|because|so|which|that|by|meaning|is|are|attained"
    r"|not)\b.*"
    r"|\. +[A-Z].*| \((?!mod)[a-z]{2,}.*"
)


def final_answer(response: str, line_first: bool = False) -> str | None:
    """Return the answer of a box, else of a marked line (``line_first``: the other way round), else
    an unmarked one."""
    first, second = (marked_line, last_closed_box) if line_first else (last_closed_box, marked_line)
    return first(response) or second(response) or unmarked_answer(response)


def last_closed_box(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{...}`` that is not empty, or the word after
    ``\boxed ``.

    ``\fbox`` and ``\framebox`` count where there is no ``\boxed``. Boxes with nothing between them
    but layout, a comma, or a word like "and" are one list, with the names in front of them: ``x =
    \boxed{3}`` or ``\boxed{5}``.
    """
    return _last_of(_BOXED, text) or _last_of(_FRAMED, text)


def _last_of(opening: re.Pattern[str], text: str) -> str | None:
    contents: list[str] = []
    name = ""
    start = len(text)
    for box in list(opening.finditer(text))[: -MAX_BOXES - 1 : -1]:
        end = closing_brace(text, box.start(1)) if box[1] == "{" else box.end(1) - 1
        content = (
            (text[box.end() : end] if box[1] == "{" else box[1]).strip() if end is not None else ""
        )
        if contents:
            gap = _plain(text[end + 1 : start]) if end is not None and end < start else "."
            if not content or not _JOINED.fullmatch(gap.removesuffix(name)):
                break
            contents[-1] = name + contents[-1]
        elif not content:
            continue
        start = box.start()
        named = _NAME.search(_plain(text[max(0, start - 40) : start]))
        name = named[0] if named else ""
        contents.append(content)
    if len(contents) > 1:
        contents[-1] = name + contents[-1]
    return ", ".join(dict.fromkeys(reversed(contents))) or None


def _plain(gap: str) -> str:
    return _SPACE.sub(" ", _WORDS.sub(r" \1 ", gap))


def marked_line(response: str) -> str | None:
    """Return the answer behind the last ``Answer:`` (one that begins a line, where one does); None
    without one."""
    marks = list(_ANSWER.finditer(response))[::-1]
    at_start = [mark for mark in marks if mark[1] is not None or mark[2]]
    for mark in at_start[:MAX_MARKS] + marks[:MAX_MARKS]:
        if rest := _behind(response, mark.end()):
            return read_line(rest)
    return None


def unmarked_answer(response: str) -> str | None:
    """Return what ``<answer>`` holds, or what is said to be the answer; None for neither."""
    if tagged := between(response, "answer"):
        return tagged[-1].strip()
    said = list(_SAID.finditer(response))
    return read_line(_behind(response, said[-1].end())) or None if said else None


def _behind(response: str, at: int) -> str:
    """Return the rest of the line, or the formula or line below an empty one."""
    rest = response[at:].lstrip()
    displayed = _DISPLAYED.match(rest[:MAX_LINE])
    line = displayed[2] if displayed else rest.partition("\n")[0]
    return _END.sub("", line.rstrip()[-MAX_LINE:]).strip()


def read_line(line: str) -> str:
    """Return the value that a sentence states; any other line as it is."""
    if (box := last_closed_box(line)) is not None:
        return box
    line = _BOLD.sub("", line)
    line = re.sub(r"(?i)^(?:an?|the)\s+(?=\S*\d)", "", line.rstrip(" ;,")).strip('"')
    # What the words of a sentence are looked for in
    masked = _MATH.sub(lambda found: "\\" * len(found[0]), line)
    if not re.search(r"(?<!\\)\b[a-zA-Z]{2}", masked):
        return line
    if not _VALUE.match(line):
        stated = [verb for verb in _VERB.finditer(masked) if _VALUE.match(masked, verb.end())]
        formulas = list(_MATH.finditer(line))
        numbers = re.findall(r"(?<![\w.,])-?\$?\d[\d.,/]*(?:\\?%)?(?!\w)", masked)
        if stated:
            line = line[stated[-1].end() :]
            masked = masked[stated[-1].end() :]
        elif formulas:
            return next(filter(None, formulas[-1].groups()))
        elif len(numbers) == 1 and _SENTENCE.match(masked):
            return numbers[0]
        else:
            return line
    reason = _REASON.search(masked)
    return line[: reason.start()] if reason else line
