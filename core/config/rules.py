"""All rules of a configuration: those of core's sections, then the recipe's own."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from core.config import recipes, registry, rulebook
from core.config.problem import Problem
from core.config.rulebook import RuleBook, Unused
from core.config.sections import (
    actor,
    algorithm,
    correction,
    critic,
    data,
    health,
    judge,
    model,
    multi_turn,
    optim,
    reward,
    rollout,
    sizes,
    trainer,
)
from core.config.view import View

# In the order of reports; of several reasons why a key does nothing the first is given.
_SECTIONS = (
    *(data, model, actor, critic, optim, sizes, rollout, multi_turn, algorithm, correction),
    *(reward, judge, trainer, health),
)
engines = RuleBook()


@engines.unused
def settings_of_other_engines(c: View) -> Unused:
    for entry in registry.ENGINES.values():
        for name in entry.reads:
            if name not in c.engine.reads:
                reason = f"actor_rollout_ref.rollout.name={c.rollout.name} has no such setting"
                yield (f"actor_rollout_ref.rollout.{name}",), reason


def books(recipe: str) -> list[RuleBook]:
    """Return the books of a recipe's rules, in the order of reports."""
    own = recipes.rules_of(recipe)
    return [engines, *(section.rules for section in _SECTIONS), *([own] if own else [])]


def problems(view: View, bad: Collection[str] = ()) -> list[Problem]:
    """Return what is broken. ``bad`` are keys that were refused already and now hold their default."""
    return rulebook.problems(books(view.recipe), view, bad)


def warnings(view: View) -> list[str]:
    """Return what can be run and is probably not meant, a line each."""
    return rulebook.warnings(books(view.recipe), view)


def reasons(view: View, keys: Iterable[str]) -> dict[str, str]:
    """Return key -> why it does nothing, for those of ``keys`` that do nothing."""
    return rulebook.reasons(books(view.recipe), view, keys)
