"""Whether a run is still well: bounds on what a step's metrics may be, and the last step within all of them.

A check compares a number of the step with ``trainer.health.<check>.bound`` (null: off); beyond it the run warns or,
with ``action=stop``, saves a checkpoint and ends. Imports no torch: the state is plain data that a checkpoint holds.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.config.schema import HealthBound, HealthConfig

Values = Mapping[str, float]


class UnhealthyRun(RuntimeError):
    """A bound with ``action=stop`` was crossed; the run is saved and ended."""


@dataclass(frozen=True)
class Crossing:
    """A bound that a step crossed."""

    check: str
    action: str
    text: str


@dataclass(frozen=True)
class Health:
    """What the checks remember from step to step.

    ``lost_updates_in_row`` counts the steps since the last one without a skipped update, ``recent_scores`` holds the
    mean scores of the last ``reward_window`` steps, ``best_score`` the largest mean over such a window.
    """

    last_healthy_step: int = 0
    lost_updates_in_row: int = 0
    recent_scores: tuple[float, ...] = ()
    best_score: float | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Health:
        return cls(**{**state, "recent_scores": tuple(state["recent_scores"])})

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def after(self, step: int, values: Values, config: HealthConfig) -> tuple[Health, list[Crossing]]:
        """The state after a step with these metrics, and the bounds that it crossed; ``config`` is trainer.health."""
        lost = sum(values.get(f"{name}/skipped_updates", 0) for name in ("actor", "critic"))
        scores = self.recent_scores
        if "critic/score/mean" in values:
            scores = (*scores, values["critic/score/mean"])[-config.reward_window :]
        best = self.best_score
        if len(scores) == config.reward_window:
            best = max(statistics.fmean(scores), -float("inf") if best is None else best)
        now = dataclasses.replace(
            self, lost_updates_in_row=self.lost_updates_in_row + 1 if lost else 0, recent_scores=scores, best_score=best
        )
        crossings = [found for name in CHECKS if (found := now.crossing(name, values, getattr(config, name)))]
        return (now if crossings else dataclasses.replace(now, last_healthy_step=step)), crossings

    def crossing(self, name: str, values: Values, config: HealthBound) -> Crossing | None:
        check = CHECKS[name]
        value = check.measure(self, values)
        if config.bound is None or value is None or not check.beyond(value, config.bound):
            return None
        text = f"{check.says.format(value)} (trainer.health.{name}.bound={config.bound:g}): {check.means}"
        return Crossing(name, config.action, text)

    def reward_drop(self) -> float | None:
        return None if self.best_score is None else self.best_score - statistics.fmean(self.recent_scores)


@dataclass(frozen=True)
class Check:
    """``measure`` gives the number (None: the step has none), ``beyond`` compares it with the bound."""

    measure: Callable[[Health, Values], float | None]
    beyond: Callable[[float, float], bool]
    says: str
    means: str


def _above(value: float, bound: float) -> bool:
    return not value <= bound  # NaN is beyond any bound


def _below(value: float, bound: float) -> bool:
    return not value >= bound


def _metric(name: str) -> Callable[[Health, Values], float | None]:
    return lambda health, values: values.get(name)


def _scorer_errors(health: Health, values: Values) -> float | None:
    rates = [values[f"reward/{status}_rate"] for status in ("timeout", "crash") if f"reward/{status}_rate" in values]
    return sum(rates) if rates else None


CHECKS: dict[str, Check] = {
    "nonfinite": Check(
        lambda health, values: health.lost_updates_in_row,
        lambda value, bound: value >= bound,
        "{:g} steps in a row skipped an update whose gradients were not finite",
        "lower optim.lr or grad_clip, and look at the batch",
    ),
    "entropy": Check(
        _metric("actor/entropy"),
        _below,
        "the policy's entropy is {:.3g} nats a token",
        "it has stopped exploring; a larger clip_ratio_high, an entropy bonus or a lower optim.lr may keep it up",
    ),
    "reward_drop": Check(
        lambda health, values: health.reward_drop(),
        _above,
        "the mean score over trainer.health.reward_window steps is {:.3g} below its best",
        "look at samples of both times",
    ),
    "logp_diff": Check(
        _metric("rollout_corr/logp_diff_mean"),
        _above,
        "log-probs of engine and learner differ by {:.3g} on average",
        "samples are off-policy; algorithm.rollout_correction weighs for that",
    ),
    "zero_variance": Check(
        _metric("reward/zero_variance_share"),
        _above,
        "{:.0%} of the groups have equal scores",
        "they teach nothing: the data may be too easy or too hard",
    ),
    "scorer_errors": Check(
        _scorer_errors,
        _above,
        "the scorer failed on {:.1%} of the answers",
        "see reward/timeout_rate and reward/crash_rate",
    ),
}
