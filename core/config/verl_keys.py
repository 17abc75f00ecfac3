"""Keys that this repository lacks but people write: what they are called here, or why they are not here.

The tables are in ``verl_keys.yaml``. **Renamed** keys, of other versions and tutorials, and **unsupported** ones are
errors that name the remedy. Keys **without effect** (``verl_keys_without_effect.yaml``) are those whose whole purpose
is met in another way; they are accepted, and listed at start. So is an unsupported key at a value that requests
nothing: ``algorithm.use_pf_ppo=False``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from core.config.yaml_tables import read_table

TABLES = Path(__file__).with_suffix(".yaml")
NO_EFFECT = TABLES.with_stem("verl_keys_without_effect")


@dataclass(frozen=True)
class Advice:
    """What is wrong with an unsupported key, and what to do; at the ``harmless`` values it requests nothing."""

    rule: str
    fix: str
    harmless: tuple[Any, ...] = ()


def table(name: str) -> Mapping[str, Any]:
    """Return one table: ``renamed``, ``unsupported``, ``no_effect`` or ``hints``, by pattern of keys."""
    return read_table(NO_EFFECT) if name == "no_effect" else read_table(TABLES)[name]


def _lookup(name: str, key: str, named: Collection[str] | None = None) -> tuple[str, Any] | None:
    """Return the entry of a key and the pattern that leads to it; only those that name it, if given the ``sections``.

    An entry names a key in full, or with ``*`` for a section of the schema: ``*.checkpoint.save_contents``.
    """
    entries = table(name)
    if key in entries:
        return key, entries[key]
    if named is None:
        return next(((pattern, found) for pattern, found in entries.items() if fnmatchcase(key, pattern)), None)
    patterns = (f"*{key[len(section) :]}" for section in named if key.startswith(f"{section}."))
    return next(((pattern, entries[pattern]) for pattern in patterns if pattern in entries), None)


def _unsupported(key: str, named: Collection[str] | None = None) -> Advice | None:
    found = _lookup("unsupported", key, named)
    if found is None:
        return None
    rule, fix, harmless = (found[1].get(part, ()) for part in ("rule", "fix", "harmless"))
    return Advice(rule, fix.replace("{key}", key), tuple(harmless))


def advice(key: str, named: Collection[str] | None = None) -> Advice | None:
    """Return what to report of a key that is renamed or unsupported; None for one that no table has.

    With ``named``, the sections of the schema, only of a key that a table names, not of one that fits a pattern.
    """
    if found := _lookup("renamed", key, named):
        pattern, target = found
        if pattern.endswith("*"):
            target = target[:-1] + key[len(pattern) - 1 :]
        return Advice("is not the name here", f"use {target}")
    return _unsupported(key, named)


def without_effect(key: str, value: Any, sections: Collection[str]) -> str | None:
    """Return why the key may stand there at this value and does nothing, or None.

    Nothing that is merely like a known key is accepted: a table has to name it. ``sections`` are those of the schema.
    """
    unsupported = _unsupported(key, sections)
    if unsupported and any(value == one and type(value) is type(one) for one in unsupported.harmless):
        return "asks for nothing that is not done anyway"
    if advice(key, sections) is None and (found := _lookup("no_effect", key, sections)):
        return found[1]
    return None


def hint(key: str) -> str | None:
    """Return what to do about a value that the key's type refuses, where there is more to it than the default."""
    found = _lookup("hints", key)
    return found[1] if found else None


def beside(key: str, known: Iterable[str], sections: Collection[str]) -> str | None:
    """Return the key of the same section that was probably meant: one of the schema's, or one that a table names."""
    section, _, name = key.rpartition(".")
    depth = key.count(".")
    named = [one for one in (*known, *_named(sections)) if one.count(".") == depth and one.startswith(f"{section}.")]
    likeness = {one: _alike(_last(one), name, 0.7) for one in named}
    best = max(likeness, key=lambda one: likeness[one], default=None)
    return best if best is not None and likeness[best] > 0.7 else None


def _named(sections: Collection[str]) -> Iterator[str]:
    """Yield every key that a table names, at each section that its ``*`` stands for."""
    for pattern in (key for name in ("renamed", "unsupported", "no_effect") for key in table(name)):
        if "*" not in pattern:
            yield pattern
        elif "*" not in pattern.removeprefix("*."):
            yield from (f"{section}{pattern[1:]}" for section in sections)


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that was probably meant, or None: no advice is better than a wrong one.

    A key is close where it is the end of a known one; where its name is a known name, in the same section or unique; or
    where name and section, or a long name alone, are misspelt. The first key of the schema wins among equals: the
    policy's before the critic's.
    """
    known = list(known)
    sections, _, name = key.rpartition(".")
    if ending := next((other for other in known if other.endswith(f".{key}")), None):
        return ending
    same_name = [other for other in known if _last(other) == name]
    near = [other for other in same_name if _inside(sections, other)]
    if near or len(same_name) == 1:
        return (near or same_name)[0]
    likeness = {other: found for other in known if 1 > (found := _alike(_last(other), name, 0.75)) > 0.75}
    for candidates in (
        {other: found for other, found in likeness.items() if _inside(sections, other)},
        {other: found for other, found in likeness.items() if found >= FAR},
        {other: found for other in known if (found := _alike(other, key, FAR)) > FAR},
    ):
        if candidates:
            return max(candidates, key=lambda other: candidates[other])
    return None


# How alike two names must be where nothing else connects them. timeout and timeout_s (0.875) are different things.
FAR = 0.9


def _inside(sections: str, other: str) -> bool:
    """Return whether a key has these sections, in this order, perhaps misspelt and with others between them."""
    rest = iter(other.split(".")[:-1])
    wanted = sections.split(".") if sections else []
    return bool(wanted) and all(any(_alike(name, one, 0.8) > 0.8 for one in rest) for name in wanted)


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _alike(one: str, other: str, least: float = 0.0) -> float:
    """Return the likeness of two texts, or 0 where a quick bound shows that it is not above ``least``."""
    matcher = difflib.SequenceMatcher(None, one, other)
    if matcher.real_quick_ratio() <= least or matcher.quick_ratio() <= least:
        return 0.0
    return matcher.ratio()
