"""Rules on keys in supervised fine-tuning (see core/config/rules.py)."""

from __future__ import annotations

from core.config.rules import View
from core.config.rules_training import Broken

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OUT = "leave it out"


def demonstrations_have_no_rewards(c: View) -> Broken:
    loss = f"{ACTOR}.policy_loss.loss_mode"
    if c.data.truncation == "middle":
        rule = "takes away what the answers stand on: a demonstration is one sequence"
        yield "data.truncation", rule, "set right to cut the end off"
    if ":" not in c.actor.policy_loss.loss_mode:
        rule = "weighs samples by their advantages, and demonstrations have none"
        yield loss, rule, "leave it out, or name a loss of your own"
    if c.estimator.critic:
        yield "algorithm.adv_estimator", "has a critic, and there is nothing to train one on", OUT
    if c.actor.use_kl_loss:
        yield f"{ACTOR}.use_kl_loss", "adds a KL to a reference policy, and there is none", OUT
    if c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward",
            ("takes a KL off a reward, and demonstrations have no reward"),
            OUT,
        )


def nothing_is_drawn(c: View) -> Broken:
    if c.rollout.n != 1:
        rule = "must be 1: a line of data.train_files is one demonstration"
        yield (
            f"{ROLLOUT}.n",
            rule,
            (f"{OUT}; answers to a question of data.val_files are {ROLLOUT}.val_kwargs.n"),
        )
    if c.rollout.temperature != 1:
        rule = (
            "must be 1: log-probs are taken at this temperature, and the likelihood is that of "
            "the model itself"
        )
        yield f"{ROLLOUT}.temperature", rule, f"{OUT}; {ROLLOUT}.val_kwargs.temperature is free"
    if c.trainer.max_staleness > 0:
        yield "trainer.max_staleness", "draws samples ahead of an update, and none are drawn", OUT
    if c.trainer.critic_warmup > 0:
        rule = "leaves out updates of the policy while a critic warms up, and there is no critic"
        yield (
            "trainer.critic_warmup",
            rule,
            (f"{OUT}; for the learning rate use {ACTOR}.optim.lr_warmup_steps"),
        )


def validation_has_questions(c: View) -> Broken:
    for name, is_set in (("test_freq", c.trainer.test_freq > 0), ("val_only", c.trainer.val_only)):
        if is_set and not c.data.val_files:
            rule = "validates by answering questions, and data.val_files names none"
            yield f"trainer.{name}", rule, "give parquet files of questions, or leave it out"


def prompts_lose_their_beginning(c: View) -> Broken:
    if c.data.truncation == "left":
        rule = "cuts the beginning of long demonstrations off, on which their answers stand"
        yield "data.truncation", rule, "right cuts the end"


PROBLEMS = (demonstrations_have_no_rewards, nothing_is_drawn, validation_has_questions)
WARNINGS = (prompts_lose_their_beginning,)
