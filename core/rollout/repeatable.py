"""Where a run needs barriers to repeat to the bit: scores that decide what is begun next, and tools if asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from core.engines.stepped import SteppedEngine
from core.rollout.barrier import Barrier

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.engines import RolloutEngine
    from core.rewards import RewardLayer
    from core.rollout.agent_loop import ToolCalls


def make_repeatable(
    config: Config, engine: RolloutEngine, reward: RewardLayer, tool_calls: ToolCalls, *, episodes: bool
) -> None:
    """Have an engine in this process await scores where they decide what is begun next, and tools where
    ``multi_turn.repeatable`` is set. Other engines are left alone."""
    if not isinstance(engine, SteppedEngine):
        return
    data, barriers = config.data, []
    in_flight = data.gen_batch_size or data.train_batch_size
    scores_decide = config.algorithm.filter_groups.enable or in_flight < data.train_batch_size
    if scores_decide and not reward.in_process:
        reward.manager = barrier = Barrier(reward.manager)
        barriers.append(barrier.settled)
    if episodes and config.actor_rollout_ref.rollout.multi_turn.repeatable:
        barriers.append(tool_calls.add_barrier())
    engine.before_step = _all_of(barriers)


def _all_of(barriers: list[Callable[[], Awaitable[bool]]]) -> Callable[[], Awaitable[bool]] | None:
    """Return one barrier that awaits them all and reports whether any had news."""

    async def wait() -> bool:
        return any([await barrier() for barrier in barriers])

    return wait if barriers else None
