"""A rule between keys, as data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from core.config import convert
from core.config.convert import Problem
from core.config.view import View

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
DAPO = "use the recipe whose trainer does: python -m recipes.dapo.main_dapo"


@dataclass(frozen=True)
class Rule:
    """``rule`` and ``fix`` are formatted with the view: ``{data.train_batch_size}``, ``{ranks}``."""

    key: str
    broken: Callable[[View], Any]
    rule: str
    fix: str

    def check(self, view: View, bad: Collection[str]) -> Problem | None:
        """The problem, if there is one; None too where the rule read a key whose own value is refused."""
        view.seen.clear()
        if not self.broken(view) or not view.seen.isdisjoint(bad):
            return None
        value = convert.get(view.config, self.key)
        return Problem(self.key, value, self.rule.format_map(view), self.fix.format_map(view))


def always(view: View) -> bool:
    return True
