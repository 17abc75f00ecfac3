"""Streaming collection: the P lowest ordinals that pass ``keep_group``, whatever finishes first.

Groups are drawn in the order of their ordinals, scored and filtered as they finish while others
still decode. Which groups a step trains on depends on the ordinals and on ``keep_group`` alone:
dropping what finishes late would train silently on short answers. Timing decides only how many
ordinals beyond the last chosen one were begun in vain.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.config.schema import Config
from core.engines.engine import RolloutEngine
from core.engines.in_process_engine import InProcessEngine
from core.errors import InputError
from core.rollout.agent_loop import Barrier
from core.tracking.metrics import BusyClock
from core.types import Dropped, ScoredGroup, StepMetrics, TrainBatch

log = logging.getLogger(__name__)

FilteredGroup = ScoredGroup | Dropped
RollGroup = Callable[[int], Awaitable[ScoredGroup]]
KeepGroup = Callable[[ScoredGroup], bool]
STOP_POLL_S = 0.5  # how long a request to stop can go unnoticed while every sample still decodes


@dataclass(frozen=True)
class CollectState:
    """What collecting carries from step to step, and what a checkpoint stores of it."""

    next_ordinal: int = 0
    # Share of groups that passed, as last seen: steers how many are begun at once
    keep_rate: float = 1.0
    # From next_ordinal on, kept or dropped
    carried: Mapping[int, FilteredGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectLimits:
    """How many groups a step is made of, and how many prompts it may draw for them."""

    wanted: int  # groups a step (P)
    in_flight: int  # prompts at once
    drawn: int  # prompts for one step, at most
    # Where too few groups pass; else the step trains on what there is
    raise_on_exhausted: bool = True
    keys: str = "data.gen_batch_size"  # whose values could be raised then


@dataclass(frozen=True)
class Collected:
    """The step's groups in the order of their ordinals, the state for the next step, and counts."""

    groups: tuple[ScoredGroup, ...]
    state: CollectState
    metrics: Mapping[str, float]
    window: range = range(0)  # the ordinals that collect_ahead is for


class Exhausted(InputError):
    """A step drew all the prompts it may and still has too few groups that pass."""


class StopRequested(Exception):
    """The run was asked to stop while it collected; the step has changed nothing yet."""


def without_carried(state: CollectState) -> CollectState:
    """Return the state as a checkpoint may hold it: timing decides what is answered beyond a
    step."""
    return dataclasses.replace(state, carried={})


async def results_of(
    work: Iterable[Awaitable[Any]], stop_requested: Callable[[], bool] | None = None
) -> list[Any]:
    """Return the results of all ``work``; if one fails, or a stop is requested, cancel the others.

    Unlike after asyncio.gather, no request is left in an engine whose weights change next.
    Raises StopRequested.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    pending = set(tasks)
    timeout = STOP_POLL_S if stop_requested else None
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()  # raises what it failed with
            if pending and stop_requested and stop_requested():
                raise StopRequested
    finally:
        await cancel(pending)
    return [task.result() for task in tasks]


async def cancel(tasks: Collection[asyncio.Future]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def collect(
    roll_group: RollGroup,
    keep_group: KeepGroup,
    state: CollectState,
    limits: CollectLimits,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    after_group: Callable[[], None] = lambda: None,
    ahead: bool = False,
) -> Collected:
    """Roll out groups until the ``limits.wanted`` lowest ordinals that pass are known, and abort
    the others.

    ``ahead``: :func:`collect_ahead` follows. Raises :class:`Exhausted` where ``limits.drawn``
    prompts have none that passes, or with ``limits.raise_on_exhausted`` too few, and
    :class:`StopRequested` once ``stop_requested()`` is true. ``after_group()`` is called after each
    group that ended.
    """
    groups, drawing = _Groups(roll_group, keep_group, state, limits), state.next_ordinal
    try:
        while not stop_requested():
            while groups.may_begin(drawing):  # carried groups alone may be enough
                groups.begin(drawing)
                drawing += 1
            if not groups.in_flight or groups.settled(state.next_ordinal):
                break
            for _ in range(await groups.filter_finished()):
                after_group()
        else:
            raise StopRequested
    finally:
        await groups.abort()
    chosen = groups.passed(drawing)[: limits.wanted]
    if len(chosen) < limits.wanted:
        message = (
            f"{len(chosen)} of the {limits.wanted} groups a step needs passed keep_group after "
            f"{groups.drawn} prompts "
            f"({len(groups.decided) - groups.kept} dropped): the data may be too easy or too hard "
            f"for the policy; "
            f"raise {limits.keys}, or change the data"
        )
        if limits.raise_on_exhausted or not chosen:
            raise Exhausted(message)
        log.warning("%s; training on the %d groups there are", message, len(chosen))
    following = chosen[-1].prompt.ordinal + 1 if len(chosen) == limits.wanted else drawing
    through = following - state.next_ordinal
    spare = -(-through // 10) if through > len(chosen) else 0
    window = range(following, following + min(through + spare, limits.drawn)) if ahead else range(0)
    too_old = set(state.carried) if ahead else set()  # for the next step
    dropped = sum(
        ordinal < following and isinstance(one, Dropped) for ordinal, one in groups.decided.items()
    )
    surplus = {ordinal: one for ordinal, one in groups.decided.items() if ordinal >= following}
    carried = {ordinal: one for ordinal, one in surplus.items() if ordinal not in too_old}
    metrics = {
        "collect/prompts_drawn": groups.drawn,
        "collect/prompts_dropped": dropped,
        "collect/keep_rate": groups.keep_rate,
        "collect/wasted_tokens": sum(
            one.tokens for o, one in surplus.items() if o not in window or o in too_old
        ),
        "collect/next_ordinal": following,
    }
    return Collected(
        tuple(chosen), CollectState(following, groups.keep_rate, carried), metrics, window
    )


async def collect_ahead(
    roll_group: RollGroup, keep_group: KeepGroup, collected: Collected, limits: CollectLimits
) -> CollectState:
    """Have the ordinals of ``collected.window`` answered and filtered with the current policy, and
    no others.

    They are as many as the step went through and, where groups are dropped, a tenth more. What the
    next step lacks its own policy answers, and what it does not reach is drawn again: timing
    decides no ordinal's policy.
    """
    state, window = collected.state, collected.window
    known = {ordinal: one for ordinal, one in state.carried.items() if ordinal in window}
    groups = _Groups(
        roll_group, keep_group, CollectState(state.next_ordinal, state.keep_rate, known), limits
    )
    missing = [ordinal for ordinal in window if ordinal not in known]
    try:
        while missing or groups.in_flight:
            while missing and len(groups.in_flight) < limits.in_flight:
                groups.begin(missing.pop(0))
            await groups.filter_finished()
    finally:
        await groups.abort()
    carried = {ordinal: groups.decided[ordinal] for ordinal in window}
    return CollectState(state.next_ordinal, groups.keep_rate, carried)


class _Groups:
    """The groups of one call: in flight, and decided, which is kept or dropped."""

    def __init__(
        self,
        roll_group: RollGroup,
        keep_group: KeepGroup,
        state: CollectState,
        limits: CollectLimits,
    ):
        self.roll_group, self.keep_group, self.limits = roll_group, keep_group, limits
        self.last_rate = state.keep_rate
        self.decided: dict[int, FilteredGroup] = dict(state.carried)
        self.in_flight: dict[asyncio.Task, int] = {}
        self.drawn = len(self.decided)  # for this step, some of them ahead of it

    def begin(self, ordinal: int) -> None:
        """Begin a group, unless it is decided already."""
        if ordinal not in self.decided:
            self.in_flight[asyncio.ensure_future(self.roll_group(ordinal))] = ordinal
            self.drawn += 1

    async def filter_finished(self) -> int:
        """Wait for groups and filter them. Return how many ended."""
        done, _ = await asyncio.wait(
            self.in_flight, timeout=STOP_POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        # A set has no order, a replay needs one
        for task in sorted(done, key=self.in_flight.__getitem__):
            ordinal = self.in_flight.pop(task)
            group = task.result()
            self.decided[ordinal] = (
                group if self.keep_group(group) else Dropped(group.version, group.tokens)
            )
        return len(done)

    async def abort(self) -> None:
        """Cancel what is in flight and wait until it has ended."""
        await cancel(self.in_flight)

    def passed(self, below: int) -> list[ScoredGroup]:
        """Return the groups of lower ordinals that passed, in their order."""
        found = (self.decided[ordinal] for ordinal in sorted(self.decided) if ordinal < below)
        return [one for one in found if isinstance(one, ScoredGroup)]

    def may_begin(self, drawing: int) -> bool:
        """Return whether the ordinal ``drawing`` is expected to be needed, and may be drawn."""
        if len(self.in_flight) >= self.limits.in_flight or self.drawn >= self.limits.drawn:
            return False
        # A carried group counts once the ordinals below it are begun: skipping one of them would be
        # a bias.
        expected = len(self.in_flight) * max(self.keep_rate, 0.01)
        return len(self.passed(drawing)) + expected < self.limits.wanted

    @property
    def kept(self) -> int:
        return sum(isinstance(one, ScoredGroup) for one in self.decided.values())

    @property
    def keep_rate(self) -> float:
        """The last step's rate, corrected by what was seen; one step's worth of groups weighs as
        much."""
        wanted = self.limits.wanted
        return (self.last_rate * wanted + self.kept) / (wanted + len(self.decided))

    def settled(self, first: int) -> bool:
        """Return whether the lowest ordinals from ``first`` on that pass are known: none below is
        undecided."""
        end = first
        while end in self.decided:
            end += 1
        return len(self.passed(end)) >= self.limits.wanted


def make_deterministic(config: Config, engine: RolloutEngine, barrier: Barrier) -> None:
    """Have an engine in this process await what decides which samples decode together: a run then
    repeats to the bit.

    Scores are awaited where they decide what is begun next, tools with
    ``multi_turn.deterministic_tools``.
    """
    if not isinstance(engine, InProcessEngine):
        return
    tools, in_flight = (
        config.actor_rollout_ref.rollout.multi_turn.deterministic_tools,
        config.data.gen_batch_size,
    )
    scores = config.drops_groups or (
        in_flight is not None and in_flight < config.data.train_batch_size
    )
    barrier.holds = frozenset(kind for kind, held in (("tools", tools), ("scores", scores)) if held)
    engine.before_step = barrier.settled if barrier.holds else None


class Ahead:
    """Answers the next step's first prompts while a step trains (``trainer.max_staleness=1``).

    Where engine and learner overlap, training has a thread, and what answers and grades stays on
    the runner's event loop in the main one: a user's function may use signals, which Python handles
    nowhere else. In one process, or on one GPU, the answers come first.
    """

    def __init__(self, runner: asyncio.Runner, clock: BusyClock, *, overlaps: bool):
        self.runner = runner
        self.clock = clock
        self.overlaps = overlaps
        self.failure: Exception | None = None  # of the work beside a step that has trained

    def train(
        self,
        train: Callable[[], TrainBatch],
        work: Coroutine[Any, Any, CollectState] | None,
        metrics: StepMetrics,
    ) -> tuple[TrainBatch, CollectState | None]:
        """Return the batch that ``train`` returns, and the state of the work, if there is any.

        Add the seconds of what was collected for the step itself. An error of the work beside the
        training is raised by :meth:`raise_failure`, once the step that has trained is complete.
        """
        state = None
        if work is not None and not self.overlaps:
            with metrics.time("gen_ahead"):
                state = self.runner.run(work)
        metrics.add({f"timing_s/{name}": seconds for name, seconds in self.clock.take().items()})
        if work is not None and self.overlaps:
            return self.runner.run(self._beside(train, work, metrics))
        return train(), state

    async def _beside(
        self,
        train: Callable[[], TrainBatch],
        work: Coroutine[Any, Any, CollectState],
        metrics: StepMetrics,
    ) -> tuple[TrainBatch, CollectState | None]:
        collecting = asyncio.ensure_future(work)
        try:
            batch = await asyncio.to_thread(train)
            with metrics.time("wait_ahead"):
                await asyncio.wait({collecting})
        finally:
            collecting.cancel()  # where training failed
            await asyncio.wait({collecting})
        self.failure = collecting.exception()
        state = None if self.failure else collecting.result()
        hidden = sum(self.clock.take().values()) - metrics.values["timing_s/wait_ahead"]
        metrics.add({"timing_s/hidden_ahead": max(0.0, hidden)})
        return batch, state

    def raise_failure(self) -> None:
        """Raise what ended the work beside the last training, if anything did."""
        if self.failure is not None:
            raise self.failure
