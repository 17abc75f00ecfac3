"""What is wrong between keys: every rule there is, all of which are looked at."""

from __future__ import annotations

from collections.abc import Collection

from core.config.convert import Problem
from core.config.rules import algorithm, doubts, episodes, objective, rewards, rollout, sizes
from core.config.rules import environment as surroundings
from core.config.view import View

RULES = (
    *(*sizes.BATCHES, *sizes.MEMORY),
    *episodes.EPISODES,
    *(*algorithm.GROUPS, *algorithm.KL, *algorithm.MISMATCH),
    *(*rewards.MANAGERS, *rewards.JUDGES, *rewards.OVERLONG),
    *(*rollout.SAMPLING, *rollout.ENGINE),
    *objective.OBJECTIVE,
    *surroundings.SURROUNDINGS,
)
WARNINGS = doubts.DOUBTS


def problems(view: View, bad: Collection[str] = ()) -> list[Problem]:
    """What is broken. ``bad`` are keys that were refused already and now hold their default."""
    return [problem for rule in RULES if (problem := rule.check(view, bad)) is not None]


def warnings(view: View) -> list[str]:
    return [str(problem) for rule in WARNINGS if (problem := rule.check(view, ())) is not None]
