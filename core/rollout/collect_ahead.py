"""Answer prompts of the next steps before a step has trained (``trainer.max_staleness``).

With a staleness of K the policy of step t answers the prompts of step t + K. Step 1 answers those
of all steps up to it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from core.rollout.collect import (
    Collected,
    CollectLimits,
    CollectState,
    GenerateGroup,
    GroupsInProgress,
    KeepGroup,
)
from core.types import StepMetrics, TrainBatch


async def answer_window(
    generate_group: GenerateGroup,
    keep_group: KeepGroup,
    collected: Collected,
    limits: CollectLimits,
) -> CollectState:
    """Answer and filter the ordinals of ``collected.ahead_window``, and no others.

    A step's own policy answers what it needs beyond them, and what has become too old for the next
    step is drawn again. So timing does not decide which policy answers an ordinal.
    """
    window = collected.ahead_window
    state = collected.state
    known = {ordinal: group for ordinal, group in state.carried.items() if ordinal in window}
    missing = [ordinal for ordinal in window if ordinal not in known]
    known_state = CollectState(state.next_ordinal, state.keep_rate, known)
    groups = GroupsInProgress(generate_group, keep_group, known_state, limits)
    try:
        while missing or groups.in_flight:
            while missing and len(groups.in_flight) < limits.max_in_flight:
                groups.draw(missing.pop(0))
            await groups.filter_finished()
    finally:
        await groups.abort()
    carried = {ordinal: groups.decided[ordinal] for ordinal in window}
    return CollectState(state.next_ordinal, state.keep_rate, carried)


async def run_both(
    learn: Callable[[], TrainBatch],
    work: Coroutine[Any, Any, CollectState],
    metrics: StepMetrics,
) -> tuple[TrainBatch, CollectState | Exception]:
    """Return the batch that ``learn`` returns, and the state that ``work`` returns or its error.

    Learning runs in a thread. What answers and grades stays on the event loop of the main thread: a
    user's function may use signals, which Python handles nowhere else.
    """
    collecting = asyncio.ensure_future(work)
    try:
        batch = await asyncio.to_thread(learn)
        with metrics.time("wait_ahead"):
            await asyncio.wait({collecting})
    finally:
        collecting.cancel()  # it still runs only if learning failed
        await asyncio.wait({collecting})
    failure = collecting.exception()
    return batch, failure or collecting.result()
