"""What an engine that decodes in this process awaits before each step, so that a run repeats to the bit.

Which samples decode together decides every last bit of their log-probs. Where results from outside decide what is begun
next (scores of filtered groups, tools), the engine therefore awaits them before each of its steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from core.engines.in_process_engine import InProcessEngine
from core.rewards.barrier import Barrier

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.engines import RolloutEngine
    from core.rewards.layer import RewardLayer


class ToolCalls:
    """Awaits tools, each on its own; after :meth:`add_barrier` together, in the order of the calls."""

    def __init__(self) -> None:
        self._jobs: _Jobs | Barrier = _Jobs()

    async def __call__(self, job: Callable[[], Awaitable[Any]]) -> Any:
        return await self._jobs.run(job)

    def add_barrier(self) -> Callable[[], Awaitable[bool]]:
        """Hand answers out together from now on, and return what an engine in this process awaits before each step."""
        self._jobs = barrier = Barrier(self._jobs)
        return barrier.settled


class _Jobs:
    async def run(self, job: Callable[[], Awaitable[Any]]) -> Any:
        return await job()


def make_repeatable(
    config: Config, engine: RolloutEngine, reward: RewardLayer, tool_calls: ToolCalls, *, episodes: bool
) -> None:
    """Have an engine in this process await scores where they decide what is begun next, and tools where
    ``multi_turn.repeatable`` is set. Other engines are left alone."""
    if not isinstance(engine, InProcessEngine):
        return
    data, barriers = config.data, []
    in_flight = data.gen_batch_size or data.train_batch_size
    if config.drops_groups or in_flight < data.train_batch_size:
        barriers += reward.add_barriers()
    if episodes and config.actor_rollout_ref.rollout.multi_turn.repeatable:
        barriers.append(tool_calls.add_barrier())
    engine.before_step = _all_of(barriers)


def _all_of(barriers: list[Callable[[], Awaitable[bool]]]) -> Callable[[], Awaitable[bool]] | None:
    """Return one barrier that awaits them all and reports whether any had news."""

    async def wait() -> bool:
        return any([await barrier() for barrier in barriers])

    return wait if barriers else None
