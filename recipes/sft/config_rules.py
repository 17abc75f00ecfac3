"""Rules on keys in supervised fine-tuning (see core/config/rules.py)."""

from __future__ import annotations

from core.config.rules import Broken
from core.config.schema import Config


def demonstrations_have_no_rewards(config: Config) -> Broken:
    if config.data.truncation == "middle":
        rule = "takes away what the answers stand on: a demonstration is one sequence"
        yield "data.truncation", rule, "set right to cut the end off"
    if ":" not in config.actor_rollout_ref.actor.policy_loss.loss_mode:
        rule = "weighs samples by their advantages, and demonstrations have none"
        fix = "leave it out, or name a loss of your own"
        yield "actor_rollout_ref.actor.policy_loss.loss_mode", rule, fix


def validation_has_questions(config: Config) -> Broken:
    if config.trainer.test_freq > 0 and not config.data.val_files:
        rule = "validates by answering questions, and data.val_files names none"
        fix = "give parquet files of questions, or leave it out"
        yield "trainer.test_freq", rule, fix


def prompts_lose_their_beginning(config: Config) -> Broken:
    if config.data.truncation == "left":
        rule = "cuts the beginning of long demonstrations off, on which their answers stand"
        yield "data.truncation", rule, "right cuts the end"


PROBLEMS = (demonstrations_have_no_rewards, validation_has_questions)
WARNINGS = (prompts_lose_their_beginning,)
