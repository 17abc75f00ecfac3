"""The section ``actor_rollout_ref.rollout.multi_turn``: what every agent loop has; tools add theirs."""

from __future__ import annotations

from core.config.extensions import extended
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Section


@extended("actor_rollout_ref.rollout.multi_turn")
class MultiTurnConfig(Section):
    repeatable: bool = False  # decoding waits for tools, so that a run repeats to the bit also with slow ones


rules = RuleBook()


@rules.problem
def episodes_repeat(c: View) -> Broken:
    if c.rollout.multi_turn.repeatable and not c.engine.seeded and c.config.needs_engine:
        yield (
            "actor_rollout_ref.rollout.multi_turn.repeatable",
            f"{c.rollout.name} draws no answer from a seed, so that a run cannot be repeated; set False, or "
            "actor_rollout_ref.rollout.name=hf",
        )


@rules.unused
def episodes_of_one_turn(c: View) -> Unused:
    if c.rollout.agent_loop in (None, "single_turn_agent"):
        yield (
            ("actor_rollout_ref.rollout.multi_turn.*", "actor_rollout_ref.actor.state_masking"),
            "a trajectory is one turn, unless the data's column agent_name names another loop: neither agent_loop "
            "nor multi_turn.enable is set to one of several turns",
        )
    if c.rollout.name != "hf" or c.trainer.backend != "local":
        yield (
            ("actor_rollout_ref.rollout.multi_turn.repeatable",),
            "only an engine in this process waits for tools",
        )
