"""Health checks: bounds on a step's metrics, and the last step that was within all of them.

A check compares a number of the step with ``trainer.health.<check>.bound`` (null: off). Beyond the bound the run warns
or, with ``action=stop``, saves a checkpoint and ends. The state is plain data that a checkpoint holds, so this module
imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.config.schema import HealthConfig

Values = Mapping[str, float]
History = Mapping[str, list[float]]
Measure = Callable[[Values, History, int], float | None]
SCORE, TRIGRAMS = "critic/score/mean", "response/repeated_trigrams"
CUT, LENGTH = "response_length/clip_ratio", "response_length/mean"
FAILED = "reward/failed_rate"  # share of all answers of a step, dropped groups included, that have no score
SKIPPED = "skipped_updates"
REMEMBERED = {SCORE, FAILED, TRIGRAMS, CUT, LENGTH}
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


@dataclass
class Health:
    """The state of the checks between steps, which a checkpoint holds.

    ``history`` has the metrics REMEMBERED of every step that had them. ``logp_diff_bound`` follows from what rounding
    costs on the model, where the configuration leaves the bound to that.
    """

    last_healthy_step: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    logp_diff_bound: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def check(
        self, step: int, values: Values, config: HealthConfig, exact: float | None = None
    ) -> list[BoundViolation]:
        """Remember a step's metrics and return the bounds that it crossed. ``config`` is trainer.health.

        ``exact`` is what rounding explains between engine and learner where nothing else does (None: something may):
        beyond it logp_diff is a fault of the program, also where samples are corrected.
        """
        for name in REMEMBERED & values.keys():
            self.history.setdefault(name, []).append(values[name])
        self.history.setdefault(SKIPPED, []).append(
            sum(values.get(f"{one}/{SKIPPED}", 0) for one in ("actor", "critic"))
        )
        violations = []
        for name, (measure, side) in CHECKS.items():
            limit, value = getattr(config, name), measure(values, self.history, config.reward_window)
            bound, text = limit.bound, TEXTS[name]
            if name == "logp_diff":
                bounds = (bound, self.logp_diff_bound, exact)
                bound, text = next((one for one in bounds if one is not None), None), text if exact is None else FAULT
            if bound is not None and value is not None and not _within(value, bound, side):
                text = f"{text.format(value)} (trainer.health.{name}.bound={bound:g})"
                violations.append(BoundViolation(name, limit.action, text, value))
        if not violations:
            self.last_healthy_step = step
        return violations


def _within(value: float, bound: float, side: str) -> bool:
    """Return whether a value is within its bound; NaN is beyond any."""
    return {"above": value <= bound, "below": value >= bound, "reached": value < bound, "fallen": -value <= bound}[side]


# -- measures: of a step's metrics, the history and trainer.health.reward_window; None where there is nothing yet --


def _metric(name: str) -> Measure:
    return lambda values, *_: values.get(name)


def _rise(name: str, share: bool = False) -> Measure:
    """Measure how far a metric has risen since the start; with ``share`` in parts of what it was."""

    def rise(_: Values, history: History, __: int) -> float | None:
        found = history.get(name, [])
        first = fmean(found[:TREND_STEPS]) if len(found) >= TREND_STEPS else None
        if first is None or (share and not first):
            return None
        return (fmean(found[-TREND_STEPS:]) - first) / (first if share else 1)

    return rise


def _entropy_gap(values: Values, *_: Any) -> float | None:
    z = values.get("rollout_corr/entropy_gap_z")
    return None if z is None else abs(z)


def _drop(_: Values, history: History, window: int) -> float | None:
    """Return how far the mean score over the window is below its best."""
    scores = history.get(SCORE, [])
    means = [fmean(scores[end - window : end]) for end in range(window, len(scores) + 1)]
    return max(means) - means[-1] if means else None


def _failed(_: Values, history: History, window: int) -> float | None:
    return fmean(history[FAILED][-window:]) if FAILED in history else None


def _lost(_: Values, history: History, __: int) -> float:
    """Count the last steps in a row that skipped an update."""
    return len(list(takewhile(bool, reversed(history[SKIPPED]))))


# check -> (measure, on which side of its bound a value is beyond it)
CHECKS: dict[str, tuple[Measure, str]] = {
    "nonfinite": (_lost, "reached"),
    "entropy": (_metric("actor/entropy"), "below"),
    "reward_drop": (_drop, "above"),
    "logp_diff": (_metric("rollout_corr/logp_diff_mean"), "above"),
    "entropy_gap": (_entropy_gap, "above"),
    "zero_variance": (_metric("reward/zero_variance_share"), "above"),
    "repetition": (_rise(TRIGRAMS), "above"),
    "unfinished": (_rise(CUT), "above"),
    "shortening": (_rise(LENGTH, share=True), "fallen"),
    "scorer_errors": (_failed, "above"),
}
READ = "read samples: the policy may have found a reward without an answer (let the scorer require a text, or use a KL)"
TEXTS = {
    "nonfinite": "{:g} steps in a row skipped an update whose gradients were not finite: lower optim.lr or grad_clip",
    "entropy": "the policy's entropy is {:.3g} nats a token: it has stopped exploring; raise clip_ratio_high, lower lr",
    "reward_drop": "the mean score over reward_window steps is {:.3g} below its best: look at samples of both times",
    "logp_diff": "log-probs of engine and learner differ by {:.3g} on average: samples are off-policy; "
    "algorithm.rollout_correction weighs for that",
    "entropy_gap": "entropy and -log p of the sampled tokens are {:.3g} standard errors apart: "
    "they are not of one distribution; look at the temperature of each, at the mask, and at what draws the tokens",
    "zero_variance": "{:.0%} of the groups have equal scores and teach nothing: the data may be too easy or too hard",
    "repetition": "the share of repeated trigrams in answers rose by {:.2f} since the start: " + READ,
    "unfinished": "the share of answers that reach the length limit rose by {:.0%} since the start: read samples, "
    "raise data.max_response_length, or shape the reward of long answers",
    "shortening": "the length of answers has changed by {:.0%} since the start: " + READ,
    "scorer_errors": "the scorer failed on {:.1%} of the answers of the last steps: the first failure was printed",
}
FAULT = (
    "log-probs of engine and learner differ by {:.3g} on average, though both compute one policy in float32: a fault "
    "of the program, which no correction weighs for; look for stale weights or caches, or shifted tokens"
)
