"""Rules on DAPO's keys (see core/config/rulebook.py)."""

from __future__ import annotations

from core.config.rulebook import Broken, RuleBook
from core.config.view import View

rules = RuleBook()


@rules.problem
def the_buffer(c: View) -> Broken:
    if c.buffer.enable and (not 1 <= c.buffer.len <= c.data.max_response_length):
        yield (
            "reward_model.overlong_buffer.len",
            f"must be between 1 and data.max_response_length={c.data.max_response_length}; shorten the buffer, or "
            "lengthen the response",
        )
    if c.buffer.enable and c.buffer.penalty_factor == 0:
        yield (
            "reward_model.overlong_buffer.penalty_factor",
            "penalises nothing; set 1.0, or reward_model.overlong_buffer.enable=False",
        )


@rules.warning
def lengths_and_validation(c: View) -> Broken:
    if (
        c.filters.enable
        and c.buffer.enable
        and c.filters.metric in ("seq_reward", "seq_final_reward", "overlong", "is_overlong")
    ):
        yield (
            "algorithm.filter_groups.metric",
            "holds the length penalty: groups of equal answers are then kept for their lengths; acc is what the "
            "scorer calls correct",
        )
    if "keep_group" in c.hooks and c.trainer.total_epochs == 1 and c.trainer.total_training_steps is None:
        yield (
            "trainer.total_epochs",
            "ends after one pass: DAPO's length only over its published file, which holds each prompt about 100 "
            "times; over data_preprocess.dapo_math's rows set trainer.total_training_steps (the paper: 330 of "
            "512 prompts)",
        )
    if "keep_group" in c.hooks and c.val.do_sample and c.val.n == 1:
        yield (
            "actor_rollout_ref.rollout.val_kwargs.n",
            "samples one answer a question: avg@32 only over DAPO's published AIME file, which holds each 32 "
            "times; over data_preprocess.aime's 30 rows set actor_rollout_ref.rollout.val_kwargs.n=32",
        )
