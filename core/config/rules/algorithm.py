"""Rules on the section algorithm: groups and their filter, KL, samples of another policy."""

from __future__ import annotations

from core.config import tables, thresholds
from core.config.rules.rule import ACTOR, DAPO, ROLLOUT, Rule
from core.config.view import View

UNGROUPED = sorted(name for name, entry in tables.ESTIMATORS.items() if not entry.groups)
CORRECTION = "algorithm.rollout_correction"

GROUPS = (
    Rule(
        "algorithm.filter_groups.enable",
        lambda v: v.filters.enable and "keep_group" not in v.hooks,
        "recipe {recipe} keeps every group: its trainer has no keep_group",
        DAPO,
    ),
    Rule(
        f"{ROLLOUT}.n",
        lambda v: v.rollout.n == 1 and v.estimator.groups,
        "algorithm.adv_estimator={algorithm.adv_estimator} compares the answers to a prompt, so it needs at least 2",
        f"set {ROLLOUT}.n=5, say, or use {', '.join(UNGROUPED[:-1])} or {UNGROUPED[-1]}",
    ),
    Rule(
        f"{ROLLOUT}.n",
        lambda v: v.rollout.n == 1 and v.filters.enable and not v.estimator.groups,
        "algorithm.filter_groups.enable=True drops groups of equal answers, and one answer equals itself",
        f"set {ROLLOUT}.n=16, say, or algorithm.filter_groups.enable=False",
    ),
    Rule(
        "data.gen_batch_size",
        lambda v: v.filters.enable and v.data.gen_batch_size < v.data.train_batch_size,
        "must be at least data.train_batch_size={data.train_batch_size} where groups are filtered",
        "raise it (three times the training batch is usual), or leave it out",
    ),
    Rule(
        "algorithm.filter_groups.max_num_gen_batches",
        lambda v: v.filters.enable and v.filters.max_num_gen_batches == 0,
        "must be at least 1: collecting for a step is bounded",
        "set 10, say; at the bound the step trains on the groups there are",
    ),
    Rule(
        "algorithm.filter_groups.metric",
        lambda v: v.filters.enable and v.filters.metric == "seq_final_reward" and v.algorithm.use_kl_in_reward,
        "holds the KL penalty, which is known only after the groups are collected",
        "use acc, score or seq_reward, or algorithm.use_kl_in_reward=False",
    ),
)

KL = (
    Rule(
        "algorithm.kl_ctrl.horizon",
        lambda v: v.kl.type == "adaptive" and v.kl.horizon <= 0,
        "must be above 0 with algorithm.kl_ctrl.type=adaptive",
        "the default is 10000 sequences",
    ),
    Rule(
        "algorithm.kl_ctrl.target_kl",
        lambda v: v.kl.type == "adaptive" and v.kl.target_kl <= 0,
        "must be above 0 with algorithm.kl_ctrl.type=adaptive",
        "the default is 0.1",
    ),
    Rule(
        "algorithm.kl_ctrl.kl_coef",
        lambda v: v.kl.type == "adaptive" and v.kl.kl_coef == 0 and v.algorithm.use_kl_in_reward,
        "is multiplied by the adaptive controller, so it stays 0",
        "set 0.001, say, or algorithm.use_kl_in_reward=False",
    ),
)


def _no_criteria(v: View) -> bool:
    one = v.correction
    if one.rollout_rs is None:
        return False
    try:
        thresholds.criteria(one.rollout_rs, one.rollout_rs_threshold, one.rollout_rs_threshold_lower)
    except ValueError:
        return True
    return False


MISMATCH = (
    Rule(
        f"{CORRECTION}.rollout_rs",
        _no_criteria,
        "its thresholds do not fit it: as many as options, above 0, the lower below the upper, lower_upper for k1 only",
        f"set {CORRECTION}.rollout_rs_threshold: 2.0 for token, 1.001 for geometric, say",
    ),
    Rule(
        f"{CORRECTION}.bypass_mode",
        lambda v: v.correction.bypass_mode and v.correction.rollout_rs is not None,
        "skips the learner's log-probs before the update, which rollout_rs compares with the engine's",
        "switch one off",
    ),
    Rule(
        f"{CORRECTION}.bypass_mode",
        lambda v: v.correction.bypass_mode and v.correction.rollout_token_veto_threshold is not None,
        "skips the learner's log-probs before the update, of which rollout_token_veto_threshold is a bound",
        "switch one off",
    ),
    Rule(
        f"{CORRECTION}.bypass_mode",
        lambda v: v.correction.bypass_mode and v.algorithm.use_kl_in_reward,
        "skips the learner's log-probs before the update, of which the KL penalty in the reward is made",
        f"use {ACTOR}.use_kl_loss, or switch one off",
    ),
    Rule(
        "trainer.max_staleness",
        lambda v: v.trainer.max_staleness > 0 and not v.corrects,
        "trains on samples of an older policy, and no rollout correction weighs for it",
        f"set {CORRECTION}.rollout_is=token, or bypass_mode=True there",
    ),
    Rule(
        "trainer.max_staleness",
        lambda v: v.trainer.max_staleness > 1,
        "is at most 1: the next step's samples are drawn while this one updates, and no earlier",
        "set 1, or 0 for samples of the policy that they train",
    ),
)
