"""Rules between keys: what is wrong with a configuration, or doubtful, though each of its values is possible.

The rules are in ``rules.yaml``, with their messages; the names that their conditions read are those of ``view.py``.
Bounds on a single key are its type's (``limits.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from core.config import convert, recipes
from core.config.convert import Problem
from core.config.view import View
from core.config.yaml_tables import entries, read_table

TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Rule:
    """A condition that must not hold. ``rule`` and ``fix`` are formatted with the view: ``{data.train_batch_size}``."""

    key: str
    when: str
    rule: str
    fix: str

    def check(self, view: View, bad: Collection[str]) -> Problem | None:
        """Return the problem, if there is one; None too where the rule read a key whose own value is refused."""
        view.seen.clear()
        if not view.holds(self.when) or not view.seen.isdisjoint(bad):
            return None
        value = convert.get(view.config, self.key)
        return Problem(self.key, value, self.rule.format_map(view), self.fix.format_map(view))


@functools.cache
def table(kind: str, recipe: str) -> tuple[Rule, ...]:
    """Return every rule of a kind, ``problems`` or ``warnings``, that holds for a recipe, in the order of reports."""
    own = recipes.table(recipe, TABLE.name) or {}
    return tuple(Rule(**one) for one in entries([*read_table(TABLE)[kind], *own.get(kind, ())]))


def problems(view: View, bad: Collection[str] = ()) -> list[Problem]:
    """Return what is broken. ``bad`` are keys that were refused already and now hold their default."""
    return [problem for rule in table("problems", view.recipe) if (problem := rule.check(view, bad)) is not None]


def warnings(view: View) -> list[str]:
    """Return what can be run and is probably not meant, a line each."""
    return [str(problem) for rule in table("warnings", view.recipe) if (problem := rule.check(view, ())) is not None]
