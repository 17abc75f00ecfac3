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
FAILED = "reward/failed_rate"  # share of all answers of a step, dropped groups included, that have no score

# Check -> the metric whose mean over the last steps is compared with its mean over the first, RISE_STEPS of each.
RISES = {"repetition": "response/repeated_trigrams", "unfinished": "response_length/clip_ratio"}
FALLS = {"shortening": "response_length/mean"}  # in shares of the first
RISE_STEPS = 3


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

    ``lost_updates_in_row`` counts the steps since the last one without a skipped update, ``recent_scores`` holds the
    mean scores of the last ``reward_window`` steps, ``best_score`` the largest mean over such a window,
    ``recent_failures`` the shares of answers without a score of as many steps. ``first`` and ``last`` hold the values
    of the metrics of :data:`RISES` and :data:`FALLS` in the first and the last RISE_STEPS steps. ``logp_diff_bound``
    follows from what rounding costs on the model, where the configuration leaves the bound to that.
    """

    last_healthy_step: int = 0
    lost_updates_in_row: int = 0
    recent_scores: tuple[float, ...] = ()
    best_score: float | None = None
    recent_failures: tuple[float, ...] = ()
    first: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    last: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    logp_diff_bound: float | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Health:
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in state.items()}
        for name in ("first", "last"):
            fields[name] = {check: tuple(values) for check, values in state.get(name, {}).items()}
        return cls(**fields)

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def after(
        self, step: int, values: Values, config: HealthConfig, *, exact: float | None = None
    ) -> tuple[Health, list[BoundViolation]]:
        """Return the state after a step with these metrics, and the bounds it crossed. ``config`` is trainer.health.

        ``exact`` is what rounding explains between engine and learner where nothing else does (None: something may):
        beyond it logp_diff is a fault of the program, also where samples are corrected.
        """
        lost = sum(values.get(f"{name}/skipped_updates", 0) for name in ("actor", "critic"))
        scores = self.recent_scores
        if "critic/score/mean" in values:
            scores = (*scores, values["critic/score/mean"])[-config.reward_window :]
        best = self.best_score
        if len(scores) == config.reward_window:
            best = max(statistics.fmean(scores), -float("inf") if best is None else best)
        failures = self.recent_failures
        if FAILED in values:
            failures = (*failures, values[FAILED])[-config.reward_window :]
        watched = {name: values[metric] for name, metric in (RISES | FALLS).items() if metric in values}
        now = dataclasses.replace(
            self,
            lost_updates_in_row=self.lost_updates_in_row + 1 if lost else 0,
            recent_scores=scores,
            best_score=best,
            recent_failures=failures,
            first={name: (*self.first.get(name, ()), value)[:RISE_STEPS] for name, value in watched.items()},
            last={name: (*self.last.get(name, ()), value)[-RISE_STEPS:] for name, value in watched.items()},
        )
        violations, measured = [], {"logp_diff": self.logp_diff_bound}
        for name, check in CHECKS.items():
            limit, value, advice = getattr(config, name), check.measure(now, values), check.advice
            bound = measured.get(name) if limit.bound is None else limit.bound
            if exact is not None and name == "logp_diff":
                bound, advice = exact if bound is None else bound, FAULT
            if bound is not None and value is not None and check.beyond(value, bound):
                text = f"{check.finding.format(value)} (trainer.health.{name}.bound={bound:g}): {advice}"
                violations.append(BoundViolation(name, limit.action, text, value))
        return (now if violations else dataclasses.replace(now, last_healthy_step=step)), violations

    def rise(self, name: str) -> float | None:
        """Return how far the metric of a check of RISES has risen since the start; None in its first steps."""
        first, last = self.first.get(name, ()), self.last.get(name, ())
        if len(first) < RISE_STEPS:
            return None
        return statistics.fmean(last) - statistics.fmean(first)

    def fall(self, name: str) -> float | None:
        """Return how far the metric of a check of FALLS has fallen since the start, in shares of what it was."""
        rise, first = self.rise(name), self.first.get(name, ())
        return None if rise is None or not any(first) else -rise / statistics.fmean(first)

    def reward_drop(self) -> float | None:
        return None if self.best_score is None else self.best_score - statistics.fmean(self.recent_scores)


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


def _sum_of(*names: str) -> Callable[[Health, Values], float | None]:
    return lambda _, values: sum(values[n] for n in names if n in values) if values.keys() & set(names) else None


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
        _sum_of("actor/entropy"),
        _below,
        "the policy's entropy is {:.3g} nats a token",
        "it has stopped exploring; a larger clip_ratio_high, an entropy bonus or a lower optim.lr may keep it up",
    ),
    "reward_drop": Check(
        lambda health, _: health.reward_drop(),
        _above,
        "the mean score over trainer.health.reward_window steps is {:.3g} below its best",
        "look at samples of both times",
    ),
    "logp_diff": Check(
        _sum_of("rollout_corr/logp_diff_mean"),
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
        _sum_of("reward/zero_variance_share"),
        _above,
        "{:.0%} of the groups have equal scores",
        "they teach nothing: the data may be too easy or too hard",
    ),
    "repetition": Check(
        lambda health, _: health.rise("repetition"),
        _above,
        "answers repeat themselves: their share of repeated trigrams rose by {:.2f} since the start",
        "read samples: the policy may have found a reward without an answer; let the scorer require a text, or keep "
        "the policy near the reference (actor.use_kl_loss)",
    ),
    "unfinished": Check(
        lambda health, _: health.rise("unfinished"),
        _above,
        "the share of answers that reach the length limit rose by {:.0%} since the start",
        "read samples; raise data.max_response_length, or shape the reward of long answers",
    ),
    "shortening": Check(
        lambda health, _: health.fall("shortening"),
        _above,
        "answers are {:.0%} shorter than at the start",
        "read samples: the policy may have found a reward without an answer; let the scorer require a text, or keep "
        "the policy near the reference (actor.use_kl_loss)",
    ),
    "scorer_errors": Check(
        lambda health, _: statistics.fmean(health.recent_failures) if health.recent_failures else None,
        _above,
        "the scorer failed on {:.1%} of the answers of the last steps",
        "the first failure was printed; see reward/failed_rate, reward/timeout_rate and reward/crash_rate",
    ),
    "judge_agreement": Check(
        _sum_of("reward/judge_canary/mean"),
        _below,
        "judge accuracy on control answers is {:.0%}",
        "another model may be behind reward_model.judge.url, or answers have learnt to persuade it",
    ),
}
