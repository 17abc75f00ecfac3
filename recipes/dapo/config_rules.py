"""Rules on DAPO's keys (see core/config/rulebook.py)."""

from __future__ import annotations

from core.config.rulebook import Broken, RuleBook
from core.config.rules import View

SHAPED = ("seq_reward", "seq_final_reward", "overlong", "is_overlong")  # metrics that hold the length penalty
rules = RuleBook()


@rules.problem
def groups_are_filtered(c: View) -> Broken:
    filters = c.algorithm.filter_groups
    if not filters.enable:
        return
    if c.rollout.n == 1 and not c.estimator.groups:
        yield (
            "actor_rollout_ref.rollout.n",
            "algorithm.filter_groups.enable=True drops groups of equal answers, and one answer equals itself; "
            "set actor_rollout_ref.rollout.n=16, say, or algorithm.filter_groups.enable=False",
        )
    if c.data.gen_batch_size < c.data.train_batch_size:
        yield (
            "data.gen_batch_size",
            f"must be at least data.train_batch_size={c.data.train_batch_size} where groups are filtered; raise "
            "it (three times the training batch is usual), or leave it out",
        )
    if filters.max_num_gen_batches == 0:
        yield (
            "algorithm.filter_groups.max_num_gen_batches",
            "must be at least 1: collecting for a step is bounded; set 10, say; at the bound the step trains on "
            "the groups there are",
        )
    if filters.metric == "seq_final_reward" and c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric",
            "holds the KL penalty, which is known only after the groups are collected; use acc, score or "
            "seq_reward, or algorithm.use_kl_in_reward=False",
        )


@rules.problem
def long_answers_are_punished(c: View) -> Broken:
    buffer = c.reward.overlong_buffer
    if not buffer.enable:
        return
    if not 1 <= buffer.len <= c.data.max_response_length:
        yield (
            "reward_model.overlong_buffer.len",
            f"must be between 1 and data.max_response_length={c.data.max_response_length}; shorten the buffer, or "
            "lengthen the response",
        )
    if buffer.penalty_factor == 0:
        yield (
            "reward_model.overlong_buffer.penalty_factor",
            "penalises nothing; set 1.0, or reward_model.overlong_buffer.enable=False",
        )
    if not c.estimator.penalties:
        yield (
            "algorithm.adv_estimator",
            f"{c.algorithm.adv_estimator} divides by the group's mean reward, which a penalty in the reward makes "
            "something else; set reward_model.overlong_buffer.enable=False",
        )


@rules.warning
def the_filter_reads_lengths(c: View) -> Broken:
    filters = c.algorithm.filter_groups
    if filters.enable and c.reward.overlong_buffer.enable and filters.metric in SHAPED:
        yield (
            "algorithm.filter_groups.metric",
            "holds the length penalty: groups of equal answers are then kept for their lengths; acc is what the "
            "scorer calls correct",
        )


@rules.warning
def the_published_files_repeat_their_rows(c: View) -> Broken:
    if c.trainer.total_epochs == 1 and c.trainer.total_training_steps is None:
        yield (
            "trainer.total_epochs",
            "ends after one pass: DAPO's length only over its published file, which holds each prompt about 100 "
            "times; over data_preprocess.dapo_math's rows set trainer.total_training_steps (the paper: 330 of "
            "512 prompts)",
        )
    if c.val.do_sample and c.val.n == 1:
        yield (
            "actor_rollout_ref.rollout.val_kwargs.n",
            "samples one answer a question: avg@32 only over DAPO's published AIME file, which holds each 32 "
            "times; over data_preprocess.aime's 30 rows set actor_rollout_ref.rollout.val_kwargs.n=32",
        )
