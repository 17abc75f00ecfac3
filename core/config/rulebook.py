"""Rules between keys, as functions: a section's file has one :class:`RuleBook` beside its keys.

A rule is a generator over a :class:`core.config.rules.View`. One of ``problem`` (the run is refused) or ``warning`` (it
can run and is probably not meant) yields keys, each with what is wrong and what to do; one of ``unused`` yields keys,
or patterns of keys, that do nothing in this configuration, and why. Bounds on a single key are its type's
(``limits.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from core.config.problem import Problem
from core.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
View = Any  # a core.config.rules.View: it reads the sections, whose files have the rules, and its fields are theirs
Broken = Iterator[tuple[str, str]]  # key, and what is wrong; what to do
Unused = Iterator[tuple[tuple[str, ...], str]]  # keys or patterns, reason


class RefusedValue(Exception):
    """A rule reads a key whose own value was refused."""


class RuleBook:
    """The rules of one file, each list in the order of definition; the names are those of decorators."""

    def __init__(self) -> None:
        self.problems: list[Callable[[View], Broken]] = []
        self.warnings: list[Callable[[View], Broken]] = []
        self.unused_keys: list[Callable[[View], Unused]] = []

    def problem(self, rule: Callable[[View], Broken]) -> Callable[[View], Broken]:
        self.problems.append(rule)
        return rule

    def warning(self, rule: Callable[[View], Broken]) -> Callable[[View], Broken]:
        self.warnings.append(rule)
        return rule

    def unused(self, rule: Callable[[View], Unused]) -> Callable[[View], Unused]:
        self.unused_keys.append(rule)
        return rule


def problems(books: Iterable[RuleBook], view: View, bad: Collection[str] = ()) -> list[Problem]:
    """Return what is broken. A rule ends where it reads one of ``bad``, keys whose values were refused already."""
    with view.refusing(bad):
        return [one for book in books for rule in book.problems for one in _broken(rule, view)]


def warnings(books: Iterable[RuleBook], view: View) -> list[str]:
    """Return what can be run and is probably not meant, a line each."""
    return [str(one) for book in books for rule in book.warnings for one in _broken(rule, view)]


def _broken(rule: Callable[[View], Broken], view: View) -> Iterator[Problem]:
    file, name = Path(rule.__code__.co_filename), getattr(rule, "__name__", "rule")
    own = not file.is_relative_to(ROOT)  # of a recipe outside the repository: its author wants to know which rule it is
    try:
        for key, text in rule(view):
            value = functools.reduce(getattr, key.split("."), view.config)
            yield Problem(key, value, f"{text} (rule {name})" if own else text)
    except RefusedValue:  # what depends on it is judged once it is mended
        return
    except Exception as error:
        if not own:
            raise
        raise InputError(
            f"{file}: the rule {name} fails: {type(error).__name__}: {error}; a rule reads c.<section>.<key> and "
            f"yields whole keys, such as algorithm.lam; the sections are {', '.join(view.sections)}"
        ) from error


def reasons(books: Iterable[RuleBook], view: View, keys: Iterable[str]) -> dict[str, str]:
    """Return key -> why it does nothing, for those of ``keys`` that do nothing. The first reason that fits is given."""
    active = [one for book in books for rule in book.unused_keys for one in rule(view)]
    reasons_by_key = {}
    for key in keys:
        for patterns, reason in active:
            if _fits(key, patterns):
                reasons_by_key[key] = reason
                break
    return reasons_by_key


@functools.cache  # hundreds of keys and patterns, and the same ones for every configuration
def _fits(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
