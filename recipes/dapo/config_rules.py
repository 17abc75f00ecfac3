"""Rules on DAPO's keys (see core/config/rules.py)."""

from __future__ import annotations

from core.config.rules import Broken
from core.config.schema import Config

# Metrics that hold the length penalty
SHAPED = ("seq_reward", "seq_final_reward", "overlong", "is_overlong")
FILTERS = "algorithm.filter_groups"
BUFFER = "reward_model.overlong_buffer"
ROLLOUT = "actor_rollout_ref.rollout"


def groups_are_filtered(config: Config) -> Broken:
    filters = config.algorithm.filter_groups
    prompts = config.data.train_batch_size
    if not filters.enable:
        return
    if config.actor_rollout_ref.rollout.n == 1:
        rule = f"{FILTERS}.enable=True drops groups of equal answers, and one answer equals itself"
        yield f"{ROLLOUT}.n", rule, f"set {ROLLOUT}.n=16, say, or {FILTERS}.enable=False"
    drawn = filters.max_num_gen_batches * config.data.gen_batch_size
    if 0 < drawn < prompts:
        rule = (
            f"times data.gen_batch_size={config.data.gen_batch_size} is less than "
            f"data.train_batch_size={prompts}: no step could be whole"
        )
        yield f"{FILTERS}.max_num_gen_batches", rule, "raise one of them; 10 is usual"
    if filters.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        rule = "holds the KL penalty, which is known only after the groups are collected"
        fix = "use acc, score or seq_reward, or algorithm.use_kl_in_reward=False"
        yield f"{FILTERS}.metric", rule, fix


def long_answers_are_punished(config: Config) -> Broken:
    buffer = config.reward_model.overlong_buffer
    limit = config.data.max_response_length
    if not buffer.enable:
        return
    if not 1 <= buffer.len <= limit:
        rule = f"must be between 1 and data.max_response_length={limit}"
        yield f"{BUFFER}.len", rule, "shorten the buffer, or lengthen the response"


def settings_do_something(config: Config) -> Broken:
    filters = config.algorithm.filter_groups
    buffer = config.reward_model.overlong_buffer
    if buffer.enable and buffer.penalty_factor == 0:
        yield f"{BUFFER}.penalty_factor", "penalises nothing", f"set 1.0, or {BUFFER}.enable=False"
    if filters.enable and filters.max_num_gen_batches == 0:
        rule = "is no limit in verl; here a step draws at most ten times the prompts that it needs"
        yield f"{FILTERS}.max_num_gen_batches", rule, "set 10, say"


def the_filter_reads_lengths(config: Config) -> Broken:
    filters = config.algorithm.filter_groups
    if filters.enable and config.reward_model.overlong_buffer.enable and filters.metric in SHAPED:
        rule = "holds the length penalty: groups of equal answers are then kept for their lengths"
        yield f"{FILTERS}.metric", rule, "acc is what the scorer calls correct"


def the_published_files_repeat_their_rows(config: Config) -> Broken:
    if config.trainer.total_epochs == 1 and config.trainer.total_training_steps is None:
        rule = (
            "is DAPO's length only over its published file, which holds each prompt about 100 times"
        )
        fix = (
            "over data_preprocess.dapo_math's rows set trainer.total_training_steps (the paper: "
            "330 of 512 prompts)"
        )
        yield "trainer.total_epochs", rule, fix
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.do_sample and val.n == 1:
        rule = "is avg@32 only over DAPO's published AIME file, which holds each question 32 times"
        fix = f"over data_preprocess.aime's 30 rows set {ROLLOUT}.val_kwargs.n=32"
        yield f"{ROLLOUT}.val_kwargs.n", rule, fix


PROBLEMS = (groups_are_filtered, long_answers_are_punished)
WARNINGS = (
    the_filter_reads_lengths,
    the_published_files_repeat_their_rows,
    settings_do_something,
)
