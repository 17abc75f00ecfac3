"""Health checks: bounds on a step's metrics, and the last step that was within all of them.

A check compares a number of the step with ``trainer.health.<check>.bound`` (null: off). Beyond the bound the run warns
or, with ``action=stop``, saves a checkpoint and ends. The state is plain data that a checkpoint holds, so this module
imports no torch.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.config.sections.trainer import HealthConfig

Values = Mapping[str, float]
SCORE, TRIGRAMS = "critic/score/mean", "response/repeated_trigrams"
CUT, LENGTH = "response_length/clip_ratio", "response_length/mean"
FAILED = "reward/failed_rate"  # share of all answers of a step, dropped groups included, that have no score
REMEMBERED = (SCORE, FAILED, TRIGRAMS, CUT, LENGTH)
TREND_STEPS = 3  # a trend compares the mean of the last steps with that of the first, so many of each


class UnhealthyRun(RuntimeError):
    """A bound with ``action=stop`` was crossed; the run is saved and ended."""


@dataclass(frozen=True)
class BoundViolation:
    """A bound of ``trainer.health`` that a step exceeded, and its value."""

    check: str
    action: str
    text: str
    value: float


class Repeats:
    """What was warned of: a warning that would come at every step comes once, and again when its number has doubled
    or halved; the others are counted."""

    def __init__(self) -> None:
        self.warned: dict[str, float] = {}
        self.counts: Counter[str] = Counter()  # of those that were not repeated

    def is_news(self, name: str, value: float) -> bool:
        """Return whether to warn of ``name`` with this number, and remember or count it."""
        last = self.warned.get(name)
        if last is not None and abs(last) / 2 < abs(value) < 2 * abs(last):
            self.counts[name] += 1
            return False
        self.warned[name] = value
        return True


@dataclass(frozen=True)
class Health:
    """The state of the checks between steps.

    ``lost_updates_in_row`` counts the steps since the last one without a skipped update, ``best_score`` is the largest
    mean score over ``reward_window`` steps. ``first`` and ``recent`` hold the values of the metrics REMEMBERED in the
    first and the last steps. ``logp_diff_bound`` follows from what rounding costs on the model, where the configuration
    leaves the bound to that.
    """

    last_healthy_step: int = 0
    lost_updates_in_row: int = 0
    best_score: float | None = None
    first: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    logp_diff_bound: float | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Health:
        series = {name: {metric: tuple(v) for metric, v in state[name].items()} for name in ("first", "recent")}
        return cls(**{**state, **series})

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def after(
        self, step: int, values: Values, config: HealthConfig, *, exact: float | None = None
    ) -> tuple[Health, list[BoundViolation]]:
        """Return the state after a step with these metrics, and the bounds it crossed. ``config`` is trainer.health.

        ``exact`` is what rounding explains between engine and learner where nothing else does (None: something may):
        beyond it logp_diff is a fault of the program, also where samples are corrected.
        """
        now = self._with(values, config.reward_window)
        violations = []
        for name, check in CHECKS.items():
            limit, value, advice = getattr(config, name), check.measure(now, values), check.advice
            bound = self.logp_diff_bound if limit.bound is None and name == "logp_diff" else limit.bound
            if exact is not None and name == "logp_diff":
                bound, advice = exact if bound is None else bound, FAULT
            if bound is not None and value is not None and check.beyond(value, bound):
                text = f"{check.finding.format(value)} (trainer.health.{name}.bound={bound:g}): {advice}"
                violations.append(BoundViolation(name, limit.action, text, value))
        return (now if violations else dataclasses.replace(now, last_healthy_step=step)), violations

    def _with(self, values: Values, window: int) -> Health:
        """Return the state with a step's metrics; ``recent`` scores and failures are of ``window`` steps."""
        first, recent = dict(self.first), dict(self.recent)
        for name in (name for name in REMEMBERED if name in values):
            first[name] = (*first.get(name, ()), values[name])[:TREND_STEPS]
            size = window if name in (SCORE, FAILED) else TREND_STEPS
            recent[name] = (*recent.get(name, ()), values[name])[-size:]
        best = self.best_score
        if len(recent.get(SCORE, ())) == window:
            best = max(statistics.fmean(recent[SCORE]), -float("inf") if best is None else best)
        lost = sum(values.get(f"{name}/skipped_updates", 0) for name in ("actor", "critic"))
        in_row = self.lost_updates_in_row + 1 if lost else 0
        return dataclasses.replace(self, lost_updates_in_row=in_row, best_score=best, first=first, recent=recent)

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric over the recent steps; None before the first."""
        return statistics.fmean(self.recent[metric]) if self.recent.get(metric) else None

    def rise(self, metric: str) -> float | None:
        """Return how far a metric has risen since the start; None in its first steps."""
        first = self.first.get(metric, ())
        return self.mean(metric) - statistics.fmean(first) if len(first) == TREND_STEPS else None

    def fall(self, metric: str) -> float | None:
        """Return how far a metric has fallen since the start, in shares of what it was."""
        rise = self.rise(metric)
        return None if rise is None or not any(self.first[metric]) else -rise / statistics.fmean(self.first[metric])


@dataclass(frozen=True)
class Check:
    """One check: ``measure`` returns the number (None: the step has none), ``beyond`` compares it with the bound."""

    measure: Callable[[Health, Values], float | None]
    beyond: Callable[[float, float], bool]
    finding: str
    advice: str


def _above(value: float, bound: float) -> bool:
    return not value <= bound  # NaN is beyond any bound


def _below(value: float, bound: float) -> bool:
    return not value >= bound


def _metric(name: str) -> Callable[[Health, Values], float | None]:
    return lambda _, values: values.get(name)


READ_SAMPLES = (
    "read samples: the policy may have found a reward without an answer; let the scorer require a text, or keep the "
    "policy near the reference (actor.use_kl_loss)"
)
FAULT = (
    "both compute one policy in float32, so this is a fault of the program and no off-policy data; do not correct for "
    "it: look for stale weights or caches, another temperature, tokens that were changed or shifted"
)
CHECKS: dict[str, Check] = {
    "nonfinite": Check(
        lambda health, _: health.lost_updates_in_row,
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
        lambda health, _: None if health.best_score is None else health.best_score - health.mean(SCORE),
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
    "entropy_gap": Check(
        lambda _, values: abs(values["rollout_corr/entropy_gap_z"]) if "rollout_corr/entropy_gap_z" in values else None,
        _above,
        "entropy and -log p of the sampled tokens are {:.3g} standard errors apart",
        "they are not of one distribution: look at the temperature of each, at the mask, and at what draws the tokens",
    ),
    "zero_variance": Check(
        _metric("reward/zero_variance_share"),
        _above,
        "{:.0%} of the groups have equal scores",
        "they teach nothing: the data may be too easy or too hard",
    ),
    "repetition": Check(
        lambda health, _: health.rise(TRIGRAMS),
        _above,
        "answers repeat themselves: their share of repeated trigrams rose by {:.2f} since the start",
        READ_SAMPLES,
    ),
    "unfinished": Check(
        lambda health, _: health.rise(CUT),
        _above,
        "the share of answers that reach the length limit rose by {:.0%} since the start",
        "read samples; raise data.max_response_length, or shape the reward of long answers",
    ),
    "shortening": Check(
        lambda health, _: health.fall(LENGTH),
        _above,
        "answers are {:.0%} shorter than at the start",
        READ_SAMPLES,
    ),
    "scorer_errors": Check(
        lambda health, _: health.mean(FAILED),
        _above,
        "the scorer failed on {:.1%} of the answers of the last steps",
        "the first failure was printed; see reward/failed_rate, reward/timeout_rate and reward/crash_rate",
    ),
}
