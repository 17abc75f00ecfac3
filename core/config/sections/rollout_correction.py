"""The section ``algorithm.rollout_correction`` with its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from core.config import limits
from core.config.rulebook import Broken, RuleBook, Unused
from core.config.section import Section

if TYPE_CHECKING:
    from core.config.view import View


class RolloutCorrectionConfig(Section):
    """Of samples that another policy drew: the engine in its own precision, an older one, a truncated one."""

    rollout_is: Literal["token", "sequence"] | None = None  # importance weights; None: none
    rollout_is_threshold: limits.WeightBounds = (
        2.0  # upper bound of a weight; "lower_upper" drops what is outside of the two
    )
    rollout_is_batch_normalize: bool = False  # scale the weights to a mean of one
    rollout_rs: limits.Rejection | None = None  # rejection, by one or several statistics; None: none
    rollout_rs_threshold: limits.NumberOrText | None = None  # upper bounds of rejection, one or one a statistic
    rollout_rs_threshold_lower: limits.NonNegative | None = (
        None  # lower bounds of token, sequence, geometric; None: 1 / threshold
    )
    rollout_token_veto_threshold: limits.PositiveShare | None = None  # one such ratio drops the sequence; None: off
    bypass_mode: bool = False  # the engine's log-probs are the old ones: no pass for them, and one ratio

    @property
    def uses_old_log_probs(self) -> bool:
        given = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold)
        return not self.bypass_mode and any(value is not None for value in given)


rules = RuleBook()


@rules.problem
def what_fits_together(c: View) -> Broken:
    if c.correction.rollout_rs is not None and not c.thresholds_fit:
        yield (
            "algorithm.rollout_correction.rollout_rs",
            "its thresholds do not fit it: as many as options, above 0, the lower below the upper, lower_upper "
            "for k1 only; set algorithm.rollout_correction.rollout_rs_threshold: 2.0 for token, 1.001 for "
            "geometric, say",
        )
    if c.correction.bypass_mode and c.correction.rollout_rs is not None:
        yield (
            "algorithm.rollout_correction.bypass_mode",
            "skips the learner's log-probs before the update, which rollout_rs compares with the engine's; set "
            "algorithm.rollout_correction.bypass_mode=False",
        )
    if c.correction.bypass_mode and c.correction.rollout_token_veto_threshold is not None:
        yield (
            "algorithm.rollout_correction.bypass_mode",
            "skips the learner's log-probs before the update, of which rollout_token_veto_threshold is a bound; "
            "set algorithm.rollout_correction.bypass_mode=False",
        )
    if c.correction.bypass_mode and c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.rollout_correction.bypass_mode",
            "skips the learner's log-probs before the update, of which the KL penalty in the reward is made; use "
            "actor_rollout_ref.actor.use_kl_loss, or switch one off",
        )


@rules.unused
def parts_that_are_off(c: View) -> Unused:
    if c.correction.bypass_mode:
        yield (
            ("algorithm.rollout_correction.rollout_is*",),
            "with bypass_mode the loss's own ratio is the importance weight",
        )
    if c.correction.rollout_is is None:
        yield (
            (
                "algorithm.rollout_correction.rollout_is_threshold",
                "algorithm.rollout_correction.rollout_is_batch_normalize",
            ),
            "algorithm.rollout_correction.rollout_is is not set",
        )
    if c.correction.rollout_rs is None:
        yield (
            ("algorithm.rollout_correction.rollout_rs_threshold*",),
            "algorithm.rollout_correction.rollout_rs is not set",
        )
    if c.correction.bypass_mode and not c.loss.has_ratio:
        yield (("algorithm.rollout_correction.bypass_mode",), f"{c.actor.policy_loss.loss_mode} has no ratio")
