"""Open questions with short answers in ``<answer>``: exact match, substring match, or word overlap.

``robust`` is ``em`` without the limit, and reads letters with and without accents, typographic
quotes and dashes, and invisible characters as the plain ones; it keeps what tells answers apart:
1.5 is not 15, C# is not C, and a last "A" is no article.

``em`` and ``subem`` are verl's ``search_r1_like_qa_em``, on the response alone; with
``min_answers=2`` and ``max_tags=None`` they are Search-R1's ``qa_em``, which reads prompt and
response and relies on the example in the prompt (on the response alone that is ``max_tags=None``).
``f1`` is SQuAD's.

A gold answer that normalises to nothing (``A+``, ``#``) is compared as it is written, in lower
case, so that an empty answer is never right. There the published functions differ: to them every
answer of articles and punctuation is right, and so is an empty one. With ``subem``, as published,
such a gold is part of every other answer.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reward_scores.score import MISSING, Score, as_text, graded, no_answer, plain
from reward_scores.tags import between, opened_tag

MAX_CHARS = 1000  # longer answers are normalised as published
METHODS = ("em", "subem", "f1", "robust")
EXAMPLES = (
    (
        "<think>the capital</think> <answer>Paris</answer>",
        {"target": ["Paris", "Paris, France"]},
        1.0,
    ),
    ("<answer> The Paris. </answer>", {"target": "paris"}, 1.0),
    ("<answer>Paris</answer> no: <answer>London</answer>", {"target": ["Paris"]}, 0.0),
    ("Paris", {"target": ["Paris"]}, 0.0),
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LIGATURES = "ae AE oe OE th Th"
_TYPOGRAPHIC = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b\u2032\u02bb\u02bc\u00b4`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict(
            zip(
                "\u0130\u0131\u00f8\u00d8\u0142\u0141\u0111\u0110\u00f0\u00d0",
                "IioOlLdDdD",
                strict=True,
            )
        ),
        **dict(zip("\u00e6\u00c6\u0153\u0152\u00fe\u00de", _LIGATURES.split(), strict=True)),
        **dict.fromkeys("\u00a3\u20ac\u00a5\u00ae\u2122\u00a9\u00bf\u00a1\u2026", " "),
    }
)
# Punctuation that stays is away, as private characters, while the rest is dropped
_OPTIONAL_MARKS = ("LATIN", "GREEK", "HEBREW", "ARABIC")
_AWAY = str.maketrans("./:#+-", "\ue001\ue002\ue003\ue004\ue005\ue006")
_BACK = {code: sign for sign, code in zip("./:#+-", _AWAY.values(), strict=True)}
_ORDINALS = """
first 1st second 2nd third 3rd fourth 4th fifth 5th sixth 6th seventh 7th eighth 8th ninth 9th
tenth 10th
"""
_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBERS = {
    **{word: at for at, word in enumerate(_WORDS.split())},
    **{word: 10 * at for at, word in enumerate(_TENS.split(), 2)},
    **dict(zip(_ORDINALS.split()[::2], _ORDINALS.split()[1::2], strict=True)),
}
_TWO_WORDS = re.compile(rf"\b({'|'.join(_TENS.split())}) ({'|'.join(_WORDS.split()[1:10])})\b")


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "em",
    format_score: float = 0.0,
    correct_score: float = 1.0,
    min_answers: int = 1,
    max_tags: int | None = 10,
) -> Score:
    """Return ``correct_score`` for a gold answer, ``format_score`` for another one, 0 where there
    is none.

    With ``em``, a right answer among more than ``max_tags`` opening or closing tags counts a
    quarter.

    ``ground_truth`` holds ``target``: a text or several. With ``f1`` the value is the best overlap
    with a gold answer, and ``acc`` is still the exact match.
    """
    if method not in METHODS:
        raise ValueError(f"qa_em method={method!r}: must be one of {', '.join(METHODS)}")
    answer = extract(opened_tag(extra_info, "answer") + response, min_answers)
    if answer is None:
        return no_answer()
    said = normalize_answer(answer)
    golds = targets(ground_truth)
    if method == "robust":
        said = plain_answer(answer)
        right = any(
            said == plain_answer(gold) != "" or answer.strip() == gold.strip() != ""
            for gold in golds
        )
    else:
        right = any(is_gold(said, answer, gold) for gold in golds)
    if method == "f1":
        best = (
            1.0
            if right
            else max((_overlap(said, _normal_gold(gold)) for gold in golds), default=0.0)
        )
        return graded(right, said, best * correct_score, f1=best)
    if method == "subem" and said:
        right = any(_normal_gold(gold) in said for gold in golds)
    if not right:
        return graded(False, said, format_score)
    tags = max(response.count("<answer>"), response.count("</answer>"))
    spam = method == "em" and max_tags is not None and tags > max_tags
    return graded(True, said, correct_score / 4 if spam else correct_score)


def targets(ground_truth: Any) -> Sequence[str]:
    """Return the gold answers; a number is its text."""
    return [str(as_text(gold)) for gold in _listed(ground_truth["target"])]


def _listed(target: Any) -> Sequence[Any]:
    golds = plain(target)
    return golds if isinstance(golds, list | tuple) else [golds]


def is_gold(said: str, answer: str, gold: str) -> bool:
    """Return whether an answer, in normal form ``said``, is gold; as written where nothing is left
    of the gold one."""
    wanted = _normal_gold(gold)
    if wanted:
        return said == wanted
    return " ".join(answer.lower().split()) == " ".join(gold.lower().split()) != ""


def extract(text: str, min_answers: int = 1) -> str | None:
    """Return the content of the last ``<answer>``; None with fewer than ``min_answers`` of them."""
    found = between(text, "answer")
    return found[-1].strip() if found and len(found) >= min_answers else None


def normalize_answer(text: str) -> str:
    """Return lower case without ASCII punctuation and articles, with single spaces (SQuAD, in this
    order)."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def plain_answer(text: str) -> str:
    """Return an answer in lower case without accents, articles and the punctuation that does not
    change it."""
    if len(text) > MAX_CHARS:
        return normalize_answer(text)
    text = (
        unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHIC))
        .casefold()
        .replace("\u2044", "/")
    )
    text = _without_accents(text)
    text = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)
    # 1,000, U.S., O'Neill
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))|(?<=[a-z])\.(?=[a-z](?![a-z]))|'", "", text)
    text = re.sub(
        r"(?<=\d)[./:](?=\d)|(?<=\w)[#+]+(?!\w)|(?<![\w ])-(?=\d)|^-(?=\d)",
        lambda found: found[0].translate(_AWAY),
        text.replace("&", " and "),
    )
    text = re.sub(rf"[{re.escape(string.punctuation)}\u00ab\u00bb]", " ", text)
    text = re.sub(r"\b(?:a|an|the) (?=(?:\w+ )*?(?!(?:a|an|the)\b)\w)", "", " ".join(text.split()))
    # J. K. Rowling
    text = re.sub(r"\b(?:[a-z] )+[a-z]\b", lambda found: found[0].replace(" ", ""), text)
    text = _TWO_WORDS.sub(lambda found: str(_NUMBERS[found[1]] + _NUMBERS[found[2]]), text)
    text = text.translate(_BACK)
    if re.fullmatch(r"\d+\.\d*0", text):  # a number alone: in Python 3.10 the 0 counts
        text = text.rstrip("0").removesuffix(".")
    return " ".join(str(_NUMBERS.get(word, word)) for word in text.split())


def _without_accents(text: str) -> str:
    """Return decomposed text without invisible characters and without the marks that its script
    may leave out: accents, vowel points. A mark of kana or Devanagari makes another letter."""
    kept = []
    optional = True
    for char in text:
        category = unicodedata.category(char)
        if category != "Mn":
            optional = unicodedata.name(char, "").startswith(_OPTIONAL_MARKS)
        if category != "Cf" and not (category == "Mn" and optional):
            kept.append(char)
    return unicodedata.normalize("NFC", "".join(kept))


@functools.lru_cache(maxsize=65536)  # a group of answers asks for the same golds
def _normal_gold(gold: str) -> str:
    return normalize_answer(gold)


def _overlap(said: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over words; 0 where one of the two has
    none."""
    words = Counter(said.split())
    wanted = Counter(gold.split())
    shared = sum((words & wanted).values())
    return 2 * shared / (words.total() + wanted.total()) if shared else 0.0


def check_ground_truth(ground_truth: Any, method: str = "em", **options: Any) -> str | None:
    if not isinstance(ground_truth, Mapping) or "target" not in ground_truth:
        return f"must hold target, got {ground_truth!r:.200}"
    golds = _listed(ground_truth["target"])
    for at, gold in enumerate(golds):
        if not isinstance(as_text(gold), str):
            field = "target" if gold is ground_truth["target"] else f"target[{at}]"
            return f"{field} must be a text or a number, got {gold!r:.200}"
    if not any(gold.strip() for gold in targets(ground_truth)):
        return "target holds no gold answer"
    empty = _nothing(ground_truth)
    if empty and method == "subem":
        return (
            f"{empty!r:.200} normalises to nothing, which is part of every answer; use another "
            f"method"
        )
    return None


def note_ground_truth(ground_truth: Any, **options: Any) -> str | None:
    """Return a remark on gold answers that normalise to nothing, or look like a missing value."""
    empty = _nothing(ground_truth)
    if empty:
        return f"target {empty!r:.200} normalises to nothing and is compared as it is written"
    missing = [gold for gold in targets(ground_truth) if gold.strip().casefold() in MISSING]
    return f"target {missing!r:.200} is how a missing value looks as text" if missing else None


def _nothing(ground_truth: Any) -> list[str]:
    return [gold for gold in targets(ground_truth) if not _normal_gold(gold)]
