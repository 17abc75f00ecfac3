"""The section ``trainer.health`` with its rules."""

from __future__ import annotations

from typing import Literal

from core.config import limits
from core.config.rulebook import RuleBook, Unused, View
from core.config.section import Section


class HealthBound(Section):
    bound: limits.NonNegative | None = None  # the bound that such a number may not cross; None: off
    action: Literal["warn", "stop"] = "warn"  # what a crossed bound does; stop saves a checkpoint first


class HealthConfig(Section):
    """What a step's metrics may be; see core.tracking.health for what each bound is compared with."""

    nonfinite: HealthBound = HealthBound(bound=3, action="stop")  # steps in a row that skipped an update
    entropy: HealthBound = HealthBound()  # least mean entropy, nats a token
    reward_drop: HealthBound = HealthBound()  # drop of the mean score below its best
    reward_window: limits.Count = 10  # steps over which reward_drop and scorer_errors average
    # mean |engine - learner| of log-probs; None: 1e-4 in float32, else by what rounding costs on the model, which is
    # measured at start; off where the difference is corrected
    logp_diff: HealthBound = HealthBound()
    entropy_gap: HealthBound = HealthBound(bound=6)  # standard errors between entropy and -log p of sampled tokens
    zero_variance: HealthBound = HealthBound()  # share of groups of equal scores
    repetition: HealthBound = HealthBound(
        bound=0.2
    )  # rise of the share of repeated trigrams of answers since the start
    unfinished: HealthBound = HealthBound(bound=0.2)  # rise of the share of answers that reach the length limit
    shortening: HealthBound = HealthBound(bound=0.5)  # fall of the mean response length, as a share of the start's
    scorer_errors: HealthBound = HealthBound(bound=0.1)  # share of answers without a score, over reward_window
    judge_agreement: HealthBound = HealthBound(bound=0.75, action="stop")  # least share of canaries graded as known


rules = RuleBook()


@rules.unused
def bounds_that_are_off(c: View) -> Unused:
    for name in (
        "nonfinite",
        "entropy",
        "reward_drop",
        "entropy_gap",
        "zero_variance",
        "repetition",
        "unfinished",
        "shortening",
        "scorer_errors",
        "judge_agreement",
    ):
        if getattr(c.trainer.health, name).bound is None:
            yield ((f"trainer.health.{name}.action",), f"trainer.health.{name}.bound is not set")
    if c.trainer.health.logp_diff.bound is None and not c.follows_rounding:
        yield (("trainer.health.logp_diff.action",), "trainer.health.logp_diff.bound is not set")
    if c.trainer.health.reward_drop.bound is None and c.trainer.health.scorer_errors.bound is None:
        yield (
            ("trainer.health.reward_window",),
            "neither trainer.health.reward_drop.bound nor trainer.health.scorer_errors.bound is set",
        )
