"""Rules on the sections actor and critic: the loss and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.config import tables
from core.config.rules.rule import ACTOR, DAPO, Rule, always
from core.config.view import View

WITH_CRITIC = ", ".join(name for name, entry in tables.ESTIMATORS.items() if entry.critic)


def _optim_rules(key: str, runs: Callable[[View], bool]) -> tuple[Rule, ...]:
    def of(v: View) -> Any:
        return v[key].optim

    def unknown_length(v: View) -> bool:
        return runs(v) and v.filters.enable and v.trainer.total_training_steps is None

    section = ACTOR if key == "actor" else key
    known = "needs the number of training steps, which filtering leaves open", "set trainer.total_training_steps"
    return (
        Rule(
            f"{section}.optim.lr_scheduler_type",
            lambda v: of(v).lr_scheduler_type == "cosine" and unknown_length(v),
            *known,
        ),
        Rule(
            f"{section}.optim.lr_warmup_steps_ratio",
            lambda v: of(v).lr_warmup_steps < 0 and of(v).lr_warmup_steps_ratio > 0 and unknown_length(v),
            known[0],
            "set trainer.total_training_steps, or give lr_warmup_steps",
        ),
        Rule(
            f"{section}.optim.lr_warmup_steps",
            lambda v: (
                runs(v) and v.trainer.total_training_steps and of(v).lr_warmup_steps > v.trainer.total_training_steps
            ),
            "is longer than the run of trainer.total_training_steps={trainer.total_training_steps}",
            "shorten the warm-up (it counts RL steps, not optimizer steps)",
        ),
    )


OBJECTIVE = (
    *_optim_rules("actor", always),
    *_optim_rules("critic", lambda v: v.critic.enable),
    Rule(
        f"{ACTOR}.overlong_filtering",
        lambda v: v.actor.overlong_filtering and "shape_reward" not in v.hooks,
        "recipe {recipe} does not mask truncated answers: its trainer has no shape_reward",
        DAPO,
    ),
    Rule(
        "critic.enable",
        lambda v: v.critic.enable != v.estimator.critic,
        "algorithm.adv_estimator={algorithm.adv_estimator} decides: "
        f"there is a critic with {WITH_CRITIC}, and with no other",
        "leave it out",
    ),
    Rule(
        "trainer.critic_warmup",
        lambda v: (
            v.critic.enable
            and v.trainer.total_training_steps is not None
            and v.trainer.critic_warmup >= v.trainer.total_training_steps
        ),
        "leaves no step of trainer.total_training_steps={trainer.total_training_steps} to the policy",
        "shorten it",
    ),
    Rule(
        f"{ACTOR}.loss_agg_mode",
        lambda v: f"{ACTOR}.loss_agg_mode" in v.given and v.loss.aggregation not in (None, v.actor.loss_agg_mode),
        "policy_loss.loss_mode={actor.policy_loss.loss_mode} is defined with {loss.aggregation}",
        "leave it out",
    ),
)
