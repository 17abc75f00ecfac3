"""Estimators, policy losses and corrections beyond those of the four papers.

``adv_estimator``, ``policy_loss.loss_mode`` and ``algorithm.rollout_correction`` ask for them.
"""

from __future__ import annotations

from core.algorithm.variants.keys import CorrectionKeys, rules
from core.config import limits
from core.config.entries import CLIP, EstimatorEntry, LossEntry
from core.config.extensions import Extension
from core.config.rulebook import Broken, Unused, View
from core.config.section import Section

HERE = "core.algorithm.variants"


class LossKeys(Section):
    tau_pos: limits.Positive = 1.0  # SAPO: temperature for positive advantages
    tau_neg: limits.Positive = 1.05  # SAPO: temperature for negative advantages


class PolicyLossKeys(Section):
    clip_cov_ratio: limits.PositiveShare = 0.0002  # Clip-Cov: share of an optimizer step's tokens that are dropped
    clip_cov_lb: float = 1.0  # lower covariance bound of Clip-Cov candidates
    clip_cov_ub: float = 5.0  # upper covariance bound of Clip-Cov candidates
    kl_cov_ratio: limits.PositiveShare = 0.0002  # KL-Cov: share of an optimizer step's tokens with a KL penalty
    ppo_kl_coef: limits.NonNegative = 0.1  # KL-Cov: coefficient of the KL penalty to the old policy


ESTIMATORS = {
    "grpo_passk": EstimatorEntry(
        f"{HERE}.more_estimators:grpo_passk",
        groups=True,
        reads=("norm_adv_by_std_in_grpo",),
    ),
    "rloo": EstimatorEntry(f"{HERE}.more_estimators:rloo", groups=True),
    "remax": EstimatorEntry(f"{HERE}.more_estimators:remax", greedy_baseline=True),
    "reinforce_plus_plus": EstimatorEntry(f"{HERE}.more_estimators:reinforce_plus_plus", reads=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorEntry(f"{HERE}.more_estimators:reinforce_plus_plus_baseline", groups=True),
    "opo": EstimatorEntry(f"{HERE}.more_estimators:opo", groups=True),
    "gpg": EstimatorEntry(f"{HERE}.more_estimators:gpg", groups=True),
    "optimal_token_baseline": EstimatorEntry(
        f"{HERE}.more_estimators:optimal_token_baseline", groups=True, squares=True
    ),
    "maxrl": EstimatorEntry(f"{HERE}.more_estimators:maxrl", groups=True, penalties=False),
}
POLICY_LOSSES = {
    "gspo": LossEntry(f"{HERE}.more_losses:gspo", aggregation="seq-mean-token-mean", sequence_ratio=True, reads=CLIP),
    "geo_mean": LossEntry(
        f"{HERE}.more_losses:geo_mean", aggregation="seq-mean-token-mean", sequence_ratio=True, reads=CLIP
    ),
    "sapo": LossEntry(f"{HERE}.more_losses:sapo", aggregation="seq-mean-token-mean", reads=("tau_pos", "tau_neg")),
    "gpg": LossEntry(f"{HERE}.more_losses:gpg", has_ratio=False),
    "reinforce": LossEntry(f"{HERE}.more_losses:gpg", has_ratio=False),
    "cispo": LossEntry(f"{HERE}.more_losses:cispo", reads=CLIP),
    "clip_cov": LossEntry(
        f"{HERE}.more_losses:clip_cov",
        selects=f"{HERE}.covariance:clip_cov_tokens",
        reads=(*CLIP, *(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub"))),
    ),
    "kl_cov": LossEntry(
        f"{HERE}.more_losses:kl_cov",
        selects=f"{HERE}.covariance:kl_cov_tokens",
        moves_without_advantage=True,
        reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
    ),
    "dppo_tv": LossEntry(f"{HERE}.more_losses:dppo_tv", divergence=0.15, reads=(*CLIP, "clip_ratio_c")),
    "dppo_kl": LossEntry(f"{HERE}.more_losses:dppo_kl", divergence=0.05, reads=(*CLIP, "clip_ratio_c")),
}


@rules.problem
def covariance_bounds_leave_room(c: View) -> Broken:
    if c.actor.policy_loss.clip_cov_lb >= c.actor.policy_loss.clip_cov_ub:
        yield (
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb",
            f"leaves no covariance below clip_cov_ub={c.actor.policy_loss.clip_cov_ub}: clip_cov would drop no "
            "token; verl's are clip_cov_lb=1.0 and clip_cov_ub=5.0",
        )


@rules.warning
def bounds_and_baselines_of_losses(c: View) -> Broken:
    if c.actor.policy_loss.loss_mode == "gspo" and c.actor.clip_ratio_high > 0.05:
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"{c.actor.policy_loss.loss_mode} clips the ratio of a whole sequence, and "
            f"clip_ratio_high={c.actor.clip_ratio_high} is never reached; the paper's bounds are "
            "clip_ratio_low=3e-4, clip_ratio_high=4e-4",
        )
    if c.loss.divergence is not None and max(c.actor.clip_ratio_low, c.actor.clip_ratio_high) > 2 * c.loss.divergence:
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"the bounds of {c.actor.policy_loss.loss_mode} are divergences: "
            f"clip_ratio_low={c.actor.clip_ratio_low}, clip_ratio_high={c.actor.clip_ratio_high} drop few tokens; "
            f"the published bound is clip_ratio={c.loss.divergence}",
        )
    if (
        c.actor.policy_loss.loss_mode == "kl_cov"
        and c.actor.ppo_epochs == 1
        and c.actor.ppo_mini_batch_size == c.data.train_batch_size
    ):
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "with one optimizer step a rollout the policy is the old one, the distance of kl_cov has no "
            "gradient, and this is the plain policy gradient; a smaller "
            "actor_rollout_ref.actor.ppo_mini_batch_size, or ppo_epochs above 1",
        )
    if c.loss.divergence is not None and (not c.gives("actor_rollout_ref.actor.clip_ratio_c")):
        yield (
            "actor_rollout_ref.actor.clip_ratio_c",
            f"{c.actor.policy_loss.loss_mode} truncates importance weights at "
            f"clip_ratio_c={c.actor.clip_ratio_c}, which holds back the rare tokens that it is meant to free; the "
            "published runs have clip_ratio_c=10000",
        )


@rules.unused
def keys_of_other_losses(c: View) -> Unused:
    if "policy_loss.clip_cov_lb" not in c.loss.reads:
        yield (("actor_rollout_ref.actor.policy_loss.clip_cov_*",), "only clip_cov has it")
    if "policy_loss.ppo_kl_coef" not in c.loss.reads:
        yield (
            ("actor_rollout_ref.actor.policy_loss.kl_cov_ratio", "actor_rollout_ref.actor.policy_loss.ppo_kl_coef"),
            "only kl_cov has it",
        )
    if "tau_pos" not in c.loss.reads:
        from core.config import registry  # which reads this declaration

        yield (("actor_rollout_ref.actor.tau_*",), f"only {registry.readers(registry.POLICY_LOSSES, 'tau_pos')} has it")


EXTENSION = Extension(
    name="variants",
    keys={
        "actor_rollout_ref.actor": LossKeys,
        "actor_rollout_ref.actor.policy_loss": PolicyLossKeys,
        "algorithm.rollout_correction": CorrectionKeys,
    },
    rules=rules,
    functions={"correct": f"{HERE}.rollout_correction:correct"},
    tables={"estimators": ESTIMATORS, "policy_losses": POLICY_LOSSES},
)
