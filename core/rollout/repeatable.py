"""Barriers that make a run repeat to the bit: an engine in this process waits for grades, and for tools.

Which samples decode together decides every last bit of their log-probs. Where answers from outside decide what is
begun next, the engine therefore awaits them before each of its steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from core.engines.stepped import SteppedEngine

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.engines import RolloutEngine
    from core.rewards import RewardLayer
    from core.rollout.agent_loop import ToolCalls

Barrier = Callable[[], Awaitable[bool]]


def make_repeatable(
    config: Config, engine: RolloutEngine, reward: RewardLayer, tool_calls: ToolCalls, *, episodes: bool
) -> None:
    """Have an engine in this process await scores where they decide what is begun next, and tools where
    ``multi_turn.repeatable`` is set. Other engines are left alone."""
    if not isinstance(engine, SteppedEngine):
        return
    data, barriers = config.data, []
    in_flight = data.gen_batch_size or data.train_batch_size
    if config.algorithm.filter_groups.enable or in_flight < data.train_batch_size:
        barriers.append(reward.in_waves())
    if episodes and config.actor_rollout_ref.rollout.multi_turn.repeatable:
        barriers.append(tool_calls.in_waves())
    engine.before_step = _all_of([barrier for barrier in barriers if barrier is not None])


def _all_of(barriers: list[Barrier]) -> Barrier | None:
    """Return one barrier that awaits them all and reports whether any had news."""

    async def wait() -> bool:
        return any([await barrier() for barrier in barriers])

    return wait if barriers else None
