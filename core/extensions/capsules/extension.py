"""Steps that can be computed again: ``trainer.capsule_steps``."""

from __future__ import annotations

from core.config import limits
from core.config.extensions import recorder
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Section


class CapsuleKeys(Section):
    # steps of which all is kept that python -m core.replay needs to compute them again; null: none
    capsule_steps: tuple[limits.Count, ...] | None = None
    capsule_max_mb: limits.Positive = 256  # disk of a run's capsules; a step beyond its equal share is not kept


rules = RuleBook()


@rules.problem
def capsules(c: View) -> Broken:
    if not c.trainer.capsule_steps:
        return
    if c.trainer.backend == "ray":
        yield (
            "trainer.capsule_steps",
            "keeps weights of a learner in one process, and trainer.backend=ray has them on its ranks; set "
            "trainer.backend=local, or leave it out; trainer.trace.steps records tokens over Ray too",
        )
    if not c.config.generates:
        yield (
            "trainer.capsule_steps",
            "keeps groups of answers with their scores, and supervised fine-tuning has none; leave it out",
        )
    if c.model.lora_rank or (c.critic.enable and c.critic_model.lora_rank):
        yield (
            "trainer.capsule_steps",
            "keeps whole models, and lora_rank trains adapters; leave it out, or train without adapters",
        )
    last = c.trainer.total_training_steps
    if last is not None and max(c.trainer.capsule_steps) > last:
        yield "trainer.capsule_steps", f"goes beyond trainer.total_training_steps={last}; name earlier steps"


@rules.unused
def no_capsules(c: View) -> Unused:
    if not c.trainer.capsule_steps:
        yield ("trainer.capsule_max_mb",), "trainer.capsule_steps names no step"


EXTENSION = recorder(
    "capsules",
    CapsuleKeys,
    rules,
    lambda config: bool(config.trainer.capsule_steps),
    "core.extensions.capsules.capsule_recorder",
)
