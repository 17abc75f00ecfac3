"""Streaming collection: the P lowest ordinals that pass ``keep_group``, whatever finishes first.

Groups are drawn in the order of their ordinals, scored and filtered as they finish while others still
decode. Which groups a step trains on depends on the ordinals and on ``keep_group`` alone, never on
finishing times: dropping what finishes late would train silently on short answers.
Timing decides only how many ordinals beyond the last chosen one were begun in vain.

**One step ahead** (``trainer.max_staleness=1``). While a step updates the policy, :func:`collect_ahead` has the next
step's first ordinals answered and filtered by the policy that the update starts from: as many as this step went through
and, where groups are dropped, a tenth more; all of them and no others. What the next step lacks beyond them its own
policy answers, and what it does not reach is drawn again. Which policy answers and filters an ordinal is thus fixed,
whatever finishes when. Samples that are in flight when a step has its groups go on if they are among those ordinals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from core.types import Dropped, ScoredGroup

log = logging.getLogger(__name__)

FilteredGroup = ScoredGroup | Dropped

STOP_POLL_S = 0.5  # how long a request to stop can go unnoticed while every sample still decodes


@dataclass(frozen=True)
class CollectState:
    """What collecting carries from step to step, and what a checkpoint stores of it.

    ``carried`` holds the groups, kept or dropped, beyond the last group that was trained on;
    it stays empty unless ``trainer.max_staleness`` lets a group train a later step. ``keep_rate`` is the
    share of groups that passed, as last seen; it steers how many are begun at once.
    """

    next_ordinal: int = 0
    keep_rate: float = 1.0
    carried: Mapping[int, FilteredGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectLimits:
    """``wanted`` groups a step (P), ``in_flight`` prompts at once, at most ``drawn`` prompts for one step.

    Where these have too few groups that pass, the step trains on what there is, or collecting ends with
    :class:`Exhausted`. ``keys`` are the keys whose values could be raised then.
    """

    wanted: int
    in_flight: int
    drawn: int
    raise_on_exhausted: bool = True
    keys: str = "data.gen_batch_size"


@dataclass(frozen=True)
class Collected:
    """The step's groups in the order of their ordinals, the state for the next step, and counts.

    ``window`` are the ordinals that :func:`collect_ahead` is for, ``in_flight`` samples of them that go on.
    """

    groups: tuple[ScoredGroup, ...]
    state: CollectState
    metrics: Mapping[str, float]
    window: range = range(0)
    in_flight: Mapping[asyncio.Task, int] = field(default_factory=dict)


class Exhausted(RuntimeError):
    """A step drew all the prompts it may and still has too few groups that pass."""


class StopRequested(Exception):
    """The run was asked to stop while it collected; the step has changed nothing yet."""


async def collect(
    roll_group: Callable[[int], Awaitable[ScoredGroup]],
    keep_group: Callable[[ScoredGroup], bool],
    state: CollectState,
    limits: CollectLimits,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    ahead: bool = False,
) -> Collected:
    """Roll out groups until the ``limits.wanted`` lowest ordinals that pass are known.

    Raises :class:`Exhausted` where ``limits.drawn`` prompts do not contain enough of them: always with
    none, otherwise only if ``limits.raise_on_exhausted``. Raises :class:`StopRequested` when ``stop_requested()``
    turns true.
    Samples in flight at the end are aborted; with ``ahead`` not those that :func:`collect_ahead` is to go on with.
    """
    step, window = _Step(roll_group, keep_group, state, limits), range(0)
    try:
        if stop_requested():
            raise StopRequested
        while step.draw() and not step.settled():  # drawn first: carried groups alone may be enough
            await step.filter_finished()
            if stop_requested():
                raise StopRequested
        chosen = step.chosen()
        if len(chosen) < limits.wanted:
            message = step.exhausted_message(len(chosen))
            if limits.raise_on_exhausted or not chosen:
                raise Exhausted(message)
            log.warning("%s; training on the %d groups there are", message, len(chosen))
        if ahead:
            window = step.window(chosen)
    finally:
        await step.abort_rest(window)
    return step.result(chosen, window, ahead=ahead)


async def collect_ahead(
    roll_group: Callable[[int], Awaitable[ScoredGroup]],
    keep_group: Callable[[ScoredGroup], bool],
    collected: Collected,
    limits: CollectLimits,
) -> CollectState:
    """Have the ordinals of ``collected.window`` answered and filtered with the current policy.

    Goes on with ``collected.in_flight`` and keeps what ``collected.state`` has of those ordinals; the same policy
    answered them. Nothing else is begun.
    """
    window = collected.window
    step = _Step(roll_group, keep_group, collected.state, limits)
    step.decided = {ordinal: step.decided[ordinal] for ordinal in window if ordinal in step.decided}
    step.in_flight = dict(collected.in_flight)
    try:
        while step.draw_all(window):
            await step.filter_finished()
    finally:
        await step.abort_rest()
    carried = {ordinal: step.decided[ordinal] for ordinal in window}
    return CollectState(collected.state.next_ordinal, step.keep_rate(), carried)


class _Step:
    """The bookkeeping of one call: what is in flight, what was kept or dropped, what to begin next."""

    def __init__(self, roll_group, keep_group, state: CollectState, limits: CollectLimits):
        self.roll_group, self.keep_group = roll_group, keep_group
        self.state, self.limits = state, limits
        self.decided: dict[int, FilteredGroup] = dict(state.carried)
        self.in_flight: dict[asyncio.Task, int] = {}
        self.next_to_draw = state.next_ordinal
        self.drawn = len(self.decided)  # for this step, some of them ahead of it

    def settled(self) -> bool:
        """Whether the lowest ``wanted`` ordinals that pass are known: no undecided ordinal below the last."""
        kept, ordinal = 0, self.state.next_ordinal
        while ordinal in self.decided:
            kept += isinstance(self.decided[ordinal], ScoredGroup)
            if kept == self.limits.wanted:
                return True
            ordinal += 1
        return False

    def draw(self) -> bool:
        """Begins as many groups as the keep rate suggests. False where nothing is left to wait for."""
        while self.may_draw() and self.too_few_expected():
            if self.next_to_draw not in self.decided:
                self.begin(self.next_to_draw)
            self.next_to_draw += 1
        return bool(self.in_flight)

    def draw_all(self, window: range) -> bool:
        """Begins what the window lacks, as many at once as may be. False where nothing is left to wait for."""
        known = {*self.decided, *self.in_flight.values()}
        missing = [ordinal for ordinal in window if ordinal not in known]
        for ordinal in missing[: max(0, self.limits.in_flight - len(self.in_flight))]:
            self.begin(ordinal)
        return bool(self.in_flight)

    def begin(self, ordinal: int) -> None:
        self.in_flight[asyncio.ensure_future(self.roll_group(ordinal))] = ordinal
        self.drawn += 1

    def may_draw(self) -> bool:
        return len(self.in_flight) < self.limits.in_flight and self.drawn < self.limits.drawn

    def too_few_expected(self) -> bool:
        # A carried group counts once the ordinals below it are begun: skipping one of them would be a bias.
        kept = sum(_passed(one) for ordinal, one in self.decided.items() if ordinal < self.next_to_draw)
        return kept + len(self.in_flight) * max(self.keep_rate(), 0.01) < self.limits.wanted

    def keep_rate(self) -> float:
        """Last step's rate, corrected by what this step has seen; one step's worth of groups weighs as much."""
        seen, passed = len(self.decided), sum(map(_passed, self.decided.values()))
        return (self.state.keep_rate * self.limits.wanted + passed) / (self.limits.wanted + seen)

    async def filter_finished(self) -> None:
        """Wait for groups and filter them."""
        done, _ = await asyncio.wait(self.in_flight, timeout=STOP_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=self.in_flight.__getitem__):  # a set has no order, a replay needs one
            ordinal = self.in_flight.pop(task)
            group = task.result()
            self.decided[ordinal] = group if self.keep_group(group) else Dropped(group.version, group.tokens)

    async def abort_rest(self, goes_on: range = range(0)) -> None:
        """Aborts what is in flight but for the ordinals of ``goes_on``."""
        aborted = [task for task, ordinal in self.in_flight.items() if ordinal not in goes_on]
        for task in aborted:
            task.cancel()
        await asyncio.gather(*aborted, return_exceptions=True)

    def chosen(self) -> list[ScoredGroup]:
        reached = [self.decided[ordinal] for ordinal in sorted(self.decided) if ordinal < self.next_to_draw]
        return [group for group in reached if _passed(group)][: self.limits.wanted]

    def following(self, chosen: list[ScoredGroup]) -> int:
        """Return the next step's first ordinal."""
        return chosen[-1].prompt.ordinal + 1 if len(chosen) == self.limits.wanted else self.next_to_draw

    def window(self, chosen: list[ScoredGroup]) -> range:
        """Return the next step's ordinals to collect ahead: they depend on what was trained, never on timing."""
        following = self.following(chosen)
        passed_through = following - self.state.next_ordinal
        spare = -(-passed_through // 10) if passed_through > len(chosen) else 0
        return range(following, following + min(passed_through + spare, self.limits.drawn))

    def result(self, chosen: list[ScoredGroup], goes_on: range, *, ahead: bool) -> Collected:
        following = self.following(chosen)
        surplus = {ordinal: one for ordinal, one in self.decided.items() if ordinal >= following}
        old = set(self.state.carried) if ahead else set()  # too old for the next step
        wasted = sum(v.tokens for o, v in surplus.items() if o not in goes_on or o in old)
        state = CollectState(following, self.keep_rate(), {o: v for o, v in surplus.items() if o not in old})
        dropped = [v for o, v in self.decided.items() if o < following and not _passed(v)]
        in_flight = {task: ordinal for task, ordinal in self.in_flight.items() if ordinal in goes_on}
        metrics = {
            "collect/prompts_drawn": self.drawn,
            "collect/prompts_dropped": len(dropped),
            "collect/keep_rate": self.keep_rate(),
            "collect/dropped_tokens": sum(one.tokens for one in dropped),
            "collect/surplus_groups": sum(map(_passed, surplus.values())),
            "collect/aborted_groups": len(self.in_flight) - len(in_flight),
            "collect/surplus_tokens": sum(one.tokens for one in surplus.values()),
            "collect/wasted_tokens": wasted,
            "collect/next_ordinal": following,
        }
        return Collected(tuple(chosen), state, metrics, goes_on, in_flight)

    def exhausted_message(self, kept: int) -> str:
        dropped = sum(not _passed(one) for one in self.decided.values())
        return (
            f"{kept} of the {self.limits.wanted} groups a step needs passed keep_group after {self.drawn} prompts "
            f"({dropped} dropped): the data may be too easy or too hard for the policy; raise "
            f"{self.limits.keys}, or change the data"
        )


def _passed(one: FilteredGroup) -> bool:
    return isinstance(one, ScoredGroup)


def fresh_enough(state: CollectState, oldest_version: int) -> CollectState:
    """Return the state without the groups, kept or dropped, of a policy older than ``oldest_version``.

    Their ordinals are drawn again, and answered by the next policy.
    """
    carried = {ordinal: one for ordinal, one in state.carried.items() if one.version >= oldest_version}
    return CollectState(state.next_ordinal, state.keep_rate, carried)
