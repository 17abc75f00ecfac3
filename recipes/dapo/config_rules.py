"""Rules on DAPO's keys (see core/config/rulebook.py)."""

from __future__ import annotations

from core.config.rulebook import Broken, RuleBook
from core.config.view import View

rules = RuleBook()


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
