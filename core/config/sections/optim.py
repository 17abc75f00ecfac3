"""The section of an optimizer and its schedule, with its rules."""

from __future__ import annotations

from typing import Literal

from core.config import limits
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Section


class OptimConfig(Section):
    lr: limits.NonNegative = 1e-6  # learning rate after the warm-up
    weight_decay: limits.NonNegative = 0.01  # of AdamW
    betas: limits.Betas = (0.9, 0.999)  # of AdamW
    lr_warmup_steps: limits.OffOrSize = -1  # RL steps of warm-up; -1: lr_warmup_steps_ratio decides
    lr_warmup_steps_ratio: limits.Share = 0.0  # warm-up as a share of the run's RL steps
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # learning rate after the warm-up
    min_lr_ratio: limits.Share | None = 0.0  # where a cosine ends, as a share of lr; None: 0
    num_cycles: limits.Positive = 0.5  # waves of a cosine; 0.5 falls from lr to its end once


rules = RuleBook()


@rules.problem
def schedules_have_an_end(c: View) -> Broken:
    for section, part, runs in (
        ("actor_rollout_ref.actor", c.actor, True),
        ("critic", c.critic, c.critic.enable),
    ):
        if part.optim.lr_scheduler_type == "cosine" and runs and c.open_length:
            yield (
                f"{section}.optim.lr_scheduler_type",
                "needs the number of training steps, which filtering leaves open; set trainer.total_training_steps",
            )
        if part.optim.lr_warmup_steps < 0 and part.optim.lr_warmup_steps_ratio > 0 and runs and c.open_length:
            yield (
                f"{section}.optim.lr_warmup_steps_ratio",
                "needs the number of training steps, which filtering leaves open; set trainer.total_training_steps, "
                "or give lr_warmup_steps",
            )
        if runs and c.trainer.total_training_steps and part.optim.lr_warmup_steps > c.trainer.total_training_steps:
            yield (
                f"{section}.optim.lr_warmup_steps",
                f"is longer than the run of trainer.total_training_steps={c.trainer.total_training_steps}; shorten "
                "the warm-up (it counts RL steps, not optimizer steps)",
            )


@rules.unused
def settings_of_another_schedule(c: View) -> Unused:
    for section, part in (
        ("actor_rollout_ref.actor", c.actor),
        ("critic", c.critic),
    ):
        if not part.shuffle:
            yield ((f"{section}.data_loader_seed",), f"{section}.shuffle is off")
        if part.optim.lr_scheduler_type != "cosine":
            yield (
                (f"{section}.optim.min_lr_ratio", f"{section}.optim.num_cycles"),
                "the learning rate is not a cosine",
            )
        if part.optim.lr_warmup_steps >= 0:
            yield ((f"{section}.optim.lr_warmup_steps_ratio",), "lr_warmup_steps is given")
