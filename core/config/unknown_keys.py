"""What to do about a key or a name that nothing knows: the nearest one that is known.

What other versions of verl call a key is in ``verl_names.py``.
"""

import functools
import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

from core.config import convert
from core.config.schema import Config
from core.config.section import Problem
from core.config.training_keys import ACTOR

COMING_FROM = Path(__file__).parents[2] / "COMING_FROM.md"
LIKE = 0.75  # least likeness of each name; a lower one gives wrong advice on misspelt keys


def unknown_key(key: str, value: Any, schema: type[Config]) -> Problem:
    """Return the problem with a key that neither the schema nor another version of verl has."""
    if key in of_trl():
        return Problem(key, value, "is a name of TRL", f"here: {of_trl()[key]}")
    near = nearest(key, convert.all_keys(schema))
    fix = f"the nearest known key is {near}"
    if near is None:
        fix = (
            "no such key here; if only a fork reads it, leave it out (--help WORD lists the keys "
            "with a word)"
        )
    return Problem(key, value, "unknown key", fix)


@functools.cache
def of_trl() -> dict[str, str]:
    """Return name in TRL -> what it is here, from the table for readers in COMING_FROM.md."""
    text = COMING_FROM.read_text(encoding="utf-8") if COMING_FROM.exists() else ""
    rows = text.partition("## Fields of TRL's GRPOConfig")[2].partition("\n## ")[0]
    fields = re.findall(r"^\| `(\w+)` \| (.*) \|$", rows, re.MULTILINE)
    return {name: here.replace("`", "") for name, here in fields}


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that was probably meant, or None: no advice beats a wrong one.

    It is the key whose last names are most like those of this one, of several the actor's. The
    first sections may be missing.
    """
    names = key.lower().replace("-", "_").split(".")
    likeness = {}
    for other in known:
        ending = other.split(".")[-len(names) :]
        if len(ending) == len(names):
            likeness[other] = min(map(_likeness, names, ending))
    best = max(likeness.values(), default=0.0)
    if best >= LIKE:
        near = [other for other in likeness if likeness[other] == best]
        near = [other for other in near if other.startswith(ACTOR)] if len(near) > 1 else near
        return near[0] if len(near) == 1 else None
    otherwise_dotted = [other for other in known if other.count(".") != key.count(".")]
    return next(iter(get_close_matches(key, otherwise_dotted, 1, 0.95)), None)


@functools.cache  # sections have few names, which keys repeat
def _likeness(name: str, other: str) -> float:
    return 1.0 if name == other else SequenceMatcher(None, name, other).ratio()


def nearest_name(value: str, names: Iterable[str]) -> str | None:
    """Return the name of a table that a value is but for its case, or that it nearly is."""
    plain = {name.lower(): name for name in names}
    near = get_close_matches(value.lower(), plain, 1, 0.7)
    return plain[near[0]] if near and plain[near[0]] != value else None
