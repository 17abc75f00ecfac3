"""The section ``algorithm`` with its rules."""

from __future__ import annotations

from typing import Literal

from core.config import registry, when
from core.config.limits import NonNegative, Share
from core.config.registry import AdvEstimator, KLKind
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import Section, key
from core.config.sections.correction import RolloutCorrectionConfig


class KLCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = key("fixed", "a coefficient that stays, or moves towards target_kl")
    kl_coef: NonNegative = key(0.001, "coefficient of the KL in the reward")
    horizon: float = key(10000, "sequences over which the adaptive coefficient moves", when.ADAPTIVE)
    target_kl: float = key(0.1, "the KL that the adaptive coefficient aims at", when.ADAPTIVE)


class AlgorithmConfig(Section):
    adv_estimator: AdvEstimator = key("gae", "advantage estimator")
    gamma: Share = key(1.0, "discount a token", when.DISCOUNTS)
    lam: Share = key(1.0, "lambda of generalised advantage estimation", when.LAMBDA)
    norm_adv_by_std_in_grpo: bool = key(
        True, "divide by the group's standard deviation; False is Dr. GRPO", when.BY_STD
    )
    use_kl_in_reward: bool = key(False, "take the KL to the reference policy off the reward")
    kl_penalty: KLKind = key("kl", "estimator of the KL in the reward", when.KL_IN_REWARD)
    kl_ctrl: KLCtrlConfig = key(KLCtrlConfig(), used_if=when.KL_IN_REWARD)
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


rules = RuleBook()


@rules.problem
def answers_are_compared(c: View) -> Broken:
    if c.config.generates and c.rollout.n == 1 and c.estimator.groups:
        others = " or ".join(sorted(name for name, entry in registry.ESTIMATORS.items() if not entry.groups))
        yield (
            "actor_rollout_ref.rollout.n",
            f"algorithm.adv_estimator={c.algorithm.adv_estimator} compares the answers to a prompt, so it needs "
            f"at least 2; set actor_rollout_ref.rollout.n=5, say, or use {others}",
        )


@rules.problem
def the_kl_controller(c: View) -> Broken:
    if c.kl.type == "adaptive" and c.kl.horizon <= 0:
        yield (
            "algorithm.kl_ctrl.horizon",
            "must be above 0 with algorithm.kl_ctrl.type=adaptive; the default is 10000 sequences",
        )
    if c.kl.type == "adaptive" and c.kl.target_kl <= 0:
        yield "algorithm.kl_ctrl.target_kl", "must be above 0 with algorithm.kl_ctrl.type=adaptive; the default is 0.1"
    if c.kl.type == "adaptive" and c.kl.kl_coef == 0 and c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.kl_ctrl.kl_coef",
            "is multiplied by the adaptive controller, so it stays 0; set 0.001, say, or "
            "algorithm.use_kl_in_reward=False",
        )


@rules.problem
def no_pass_for_old_log_probs(c: View) -> Broken:
    if c.correction.bypass_mode and c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.rollout_correction.bypass_mode",
            "skips the learner's log-probs before the update, of which the KL penalty in the reward is made; use "
            "actor_rollout_ref.actor.use_kl_loss, or switch one off",
        )


@rules.problem
def the_estimator(c: View) -> Broken:
    if c.estimator.squares and c.correction.bypass_mode:
        yield (
            "algorithm.adv_estimator",
            f"{c.algorithm.adv_estimator} reads the learner's distributions, and bypass_mode makes no pass for "
            "them; set algorithm.rollout_correction.bypass_mode=False",
        )
    if not c.estimator.penalties and c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.adv_estimator",
            f"{c.algorithm.adv_estimator} divides by the group's mean reward, which a penalty in the reward makes "
            "something else; set algorithm.use_kl_in_reward=False; use_kl_loss has the KL in the loss",
        )


@rules.warning
def a_coefficient_stands_alone(c: View) -> Broken:
    """Say which defaults a line of verl up to 0.3 relied on: it gives the coefficient, and had no switch."""
    if not c.gives("algorithm.kl_ctrl.kl_coef") or not c.kl.kl_coef or c.gives("algorithm.use_kl_in_reward"):
        return
    if not c.needs_ref:
        yield (
            "algorithm.kl_ctrl.kl_coef",
            "takes no KL off the reward, which is off unless switched on and was on in verl up to 0.3; set "
            "algorithm.use_kl_in_reward=True, or False to say that this is meant",
        )
    if not c.gives("actor_rollout_ref.actor.entropy_coeff"):
        yield (
            "actor_rollout_ref.actor.entropy_coeff",
            "was 0.001 by default in verl up to 0.3, whose command lines give kl_ctrl.kl_coef without "
            "use_kl_in_reward; set actor_rollout_ref.actor.entropy_coeff=0.001, or 0 to say that this is meant",
        )
