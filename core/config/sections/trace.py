"""The section ``trainer.trace``, and the rules on recorded steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.config import limits
from core.config.rulebook import Broken, RuleBook, Unused
from core.config.section import Section

if TYPE_CHECKING:
    from core.config.view import View


class TraceConfig(Section):
    """What is recorded of every token of some steps, for ``python -m results.trace``."""

    freq: limits.OffOrCount = -1  # record every so many steps, the first and the last one too; -1: steps alone
    steps: tuple[limits.Count, ...] | None = None  # record these steps as well
    # groups of a recorded step, questions that recur where possible; the worst, the strangest and the first dropped one
    # are recorded beside them
    groups: limits.Count = 2
    max_mb: limits.Positive = 256  # disk of a run's records; older ones make room, the first one stays


rules = RuleBook()


@rules.problem
def capsules(c: View) -> Broken:
    if c.trainer.capsule_steps and c.trainer.backend == "ray":
        yield (
            "trainer.capsule_steps",
            "keeps weights of a learner in one process, and trainer.backend=ray has them on its ranks; set "
            "trainer.backend=local, or leave it out; trainer.trace.steps records tokens over Ray too",
        )
    if c.trainer.capsule_steps and (c.model.lora_rank or (c.critic.enable and c.critic_model.lora_rank)):
        yield (
            "trainer.capsule_steps",
            "keeps whole models, and lora_rank trains adapters; leave it out, or train without adapters",
        )
    if (
        c.trainer.capsule_steps
        and c.trainer.total_training_steps is not None
        and (max(c.trainer.capsule_steps) > c.trainer.total_training_steps)
    ):
        yield (
            "trainer.capsule_steps",
            f"goes beyond trainer.total_training_steps={c.trainer.total_training_steps}; name earlier steps",
        )


@rules.unused
def nothing_is_recorded(c: View) -> Unused:
    if c.trainer.trace.freq == -1 and not c.trainer.trace.steps:
        yield (
            ("trainer.trace.groups", "trainer.trace.max_mb"),
            "neither trainer.trace.freq nor trainer.trace.steps is set",
        )
    if not c.trainer.capsule_steps:
        yield (("trainer.capsule_max_mb",), "trainer.capsule_steps names no step")
