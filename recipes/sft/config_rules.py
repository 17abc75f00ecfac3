"""Rules on keys in supervised fine-tuning (see core/config/rulebook.py)."""

from __future__ import annotations

from core.config.rulebook import Broken, RuleBook, Unused
from core.config.rules import View

rules = RuleBook()


@rules.problem
def demonstrations_have_no_rewards(c: View) -> Broken:
    if c.data.truncation == "middle":
        yield (
            "data.truncation",
            "takes away what the answers stand on: a demonstration is a prompt and its answers in one sequence; "
            "set right to cut the end off",
        )
    if ":" not in c.actor.policy_loss.loss_mode:
        yield (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "weighs samples that a policy drew by their advantages, and demonstrations have none; leave it out, "
            "or name a loss of your own",
        )
    if c.estimator.critic:
        yield (
            "algorithm.adv_estimator",
            "has a critic, and supervised fine-tuning has nothing to train one on; leave it out",
        )
    if c.actor.use_kl_loss:
        yield (
            "actor_rollout_ref.actor.use_kl_loss",
            "adds a KL to a reference policy, which supervised fine-tuning does not have; leave it out",
        )
    if c.algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward", "takes a KL off a reward, and demonstrations have no reward; leave it out"


@rules.problem
def nothing_is_drawn(c: View) -> Broken:
    if c.rollout.n != 1:
        yield (
            "actor_rollout_ref.rollout.n",
            "must be 1: a line of data.train_files is one demonstration; leave it out; answers to a question of "
            "data.val_files are actor_rollout_ref.rollout.val_kwargs.n",
        )
    if c.rollout.temperature != 1:
        yield (
            "actor_rollout_ref.rollout.temperature",
            "must be 1: log-probs are taken at this temperature, and the likelihood is that of the model itself; "
            "leave it out; actor_rollout_ref.rollout.val_kwargs.temperature is free",
        )
    if c.trainer.max_staleness > 0:
        yield (
            "trainer.max_staleness",
            "draws samples ahead of an update, and supervised fine-tuning draws none; leave it out",
        )
    if c.trainer.critic_warmup > 0:
        yield (
            "trainer.critic_warmup",
            "leaves out updates of the policy while a critic warms up, and there is no critic; leave it out; a "
            "warm-up of the learning rate is actor_rollout_ref.actor.optim.lr_warmup_steps",
        )


@rules.problem
def validation_has_questions(c: View) -> Broken:
    for name, set in (
        ("test_freq", c.trainer.test_freq > 0),
        ("val_only", c.trainer.val_only),
    ):
        if set and not c.data.val_files:
            yield (
                f"trainer.{name}",
                "validates by answering questions, and data.val_files names none; give parquet files of questions, "
                "or leave it out",
            )


@rules.warning
def prompts_lose_their_beginning(c: View) -> Broken:
    if c.data.truncation == "left":
        yield (
            "data.truncation",
            "cuts the beginning of long demonstrations off, on which their answers stand; right cuts the end",
        )


@rules.unused
def nothing_is_sampled(c: View) -> Unused:
    yield ("algorithm.*",), "demonstrations have no rewards and no advantages to estimate"
    yield (
        (
            "actor_rollout_ref.actor.clip_ratio*",
            "actor_rollout_ref.actor.tau_*",
            "actor_rollout_ref.actor.state_masking",
            "actor_rollout_ref.actor.kl_loss_*",
        ),
        "the objective is a likelihood",
    )
    yield (
        (
            "actor_rollout_ref.rollout.do_sample",
            "actor_rollout_ref.rollout.top_p",
            "actor_rollout_ref.rollout.top_k",
            "actor_rollout_ref.rollout.ignore_eos",
            "actor_rollout_ref.rollout.log_prob_*",
            "data.gen_batch_size",
            "reward_model.num_examine",
            "trainer.rollout_data_dir",
            "trainer.health.reward_drop.*",
            "trainer.health.reward_window",
            "trainer.health.logp_diff.*",
            "trainer.health.entropy_gap.*",
            "trainer.health.zero_variance.*",
            "trainer.health.scorer_errors.*",
        ),
        "a step trains on demonstrations and samples no answers",
    )
    if not c.data.val_files:
        yield (
            (
                "actor_rollout_ref.rollout.*",
                "actor_rollout_ref.hybrid_engine",
                "reward_model.*",
                "custom_reward_function.*",
                "trainer.val_before_train",
                "trainer.validation_data_dir",
                "trainer.log_val_generations",
                "data.val_max_samples",
                "data.validation_shuffle",
            ),
            "data.val_files is empty: nothing is answered, and there is no engine",
        )
