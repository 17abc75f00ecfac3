"""Records of tokens: ``trainer.trace``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.config import limits
from core.config.extensions import recorder
from core.config.rulebook import RuleBook, Unused, View
from core.config.section import Section

if TYPE_CHECKING:
    from core.config.schema import Config


class TraceConfig(Section):
    """What is recorded of every token of some steps, for ``python -m results.trace``."""

    freq: limits.OffOrCount = -1  # steps between records, first and last step included; -1: only trainer.trace.steps
    steps: tuple[limits.Count, ...] | None = None  # record these steps as well
    # groups of a recorded step, the same questions in every step where possible; beside them the group of the lowest
    # score, that of the largest engine-learner difference and the first one that was dropped are recorded
    groups: limits.Count = 2
    max_mb: limits.Positive = 256  # disk of a run's records; older ones make room, the first one stays


class TraceKeys(Section):
    trace: TraceConfig = TraceConfig()


rules = RuleBook()


def used(config: Config) -> bool:
    return config.trainer.trace.freq > 0 or bool(config.trainer.trace.steps)


@rules.unused
def nothing_is_recorded(c: View) -> Unused:
    if c.trainer.trace.freq == -1 and not c.trainer.trace.steps:
        yield (
            ("trainer.trace.groups", "trainer.trace.max_mb"),
            "neither trainer.trace.freq nor trainer.trace.steps is set",
        )


EXTENSION = recorder("trace", TraceKeys, rules, used, "core.trace.trace_recorder")
