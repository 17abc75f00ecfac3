"""What can be run and is probably not meant: warnings, not problems."""

from __future__ import annotations

from core.config.rules.rule import ACTOR, ROLLOUT, Rule
from core.config.schema import FULL_PRECISION

PENALISED = ("seq_reward", "seq_final_reward", "overlong", "is_overlong")  # what a shaped score's length enters

DOUBTS = (
    Rule(
        f"{ROLLOUT}.dtype",
        lambda v: (v.rollout.dtype in FULL_PRECISION) != (v.actor.fsdp_config.dtype in FULL_PRECISION),
        "the engine's precision is not the learner's (fsdp_config.dtype={actor.fsdp_config.dtype}): log-probs differ",
        "set both",
    ),
    Rule(
        f"{ACTOR}.use_kl_loss",
        lambda v: v.actor.use_kl_loss and v.algorithm.use_kl_in_reward,
        "the KL to the reference is penalised twice, in the loss and in the reward",
        "switch one off, unless that is meant",
    ),
    Rule(
        f"{ACTOR}.policy_loss.loss_mode",
        lambda v: v.loss.sequence_ratio and v.actor.clip_ratio_high > 0.05,
        "{actor.policy_loss.loss_mode} clips the ratio of a whole sequence, "
        "and clip_ratio_high={actor.clip_ratio_high} is never reached",
        "the paper's bounds are clip_ratio_low=3e-4, clip_ratio_high=4e-4",
    ),
    Rule(
        "algorithm.filter_groups.metric",
        lambda v: v.filters.enable and v.buffer.enable and v.filters.metric in PENALISED,
        "holds the length penalty: groups of equal answers are then kept for their lengths",
        "acc is what the scorer calls correct",
    ),
    Rule(
        "trainer.total_epochs",
        lambda v: "keep_group" in v.hooks and v.trainer.total_epochs == 1 and v.trainer.total_training_steps is None,
        "ends after one pass: DAPO's length only over its published file, which holds each prompt about 100 times",
        "over data_preprocess.dapo_math's rows set trainer.total_training_steps (the paper: 330 of 512 prompts)",
    ),
    Rule(
        f"{ROLLOUT}.val_kwargs.n",
        lambda v: "keep_group" in v.hooks and v.val.do_sample and v.val.n == 1,
        "samples one answer a question: avg@32 only over DAPO's published AIME file, which holds each 32 times",
        f"over data_preprocess.aime's 30 rows set {ROLLOUT}.val_kwargs.n=32",
    ),
)
