"""Streaming collection: the P lowest ordinals that pass ``keep_group``, whatever finishes first.

Groups are drawn in the order of their ordinals, scored and judged as they finish while others still
decode. Which groups a step trains on depends on the ordinals and on ``keep_group`` alone, never on
finishing times (DESIGN I4): dropping what finishes late would train silently on short answers.
Timing decides only how many ordinals beyond the last chosen one were begun in vain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from core.types import ScoredGroup

log = logging.getLogger(__name__)

STOP_POLL_S = 0.5  # how long a request to stop can go unnoticed while every sample still decodes


@dataclass(frozen=True)
class CollectState:
    """What collecting carries from step to step, and what a checkpoint stores of it.

    ``carried`` holds judged groups beyond the last one that was trained on (None: judged and dropped);
    it stays empty unless ``trainer.max_staleness`` lets a group train a later step. ``keep_rate`` is the
    share of groups that passed, as last seen; it steers how many are begun at once.
    """

    next_ordinal: int = 0
    keep_rate: float = 1.0
    carried: Mapping[int, ScoredGroup | None] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectLimits:
    """``wanted`` groups a step (P), ``in_flight`` prompts at once, at most ``drawn`` prompts for one step."""

    wanted: int
    in_flight: int
    drawn: int


@dataclass(frozen=True)
class Collected:
    """The step's groups in the order of their ordinals, the state for the next step, and counts."""

    groups: tuple[ScoredGroup, ...]
    state: CollectState
    metrics: Mapping[str, float]


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
    raise_on_exhausted: bool = True,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Collected:
    """Rolls out groups until the ``limits.wanted`` lowest ordinals that pass are known.

    Raises :class:`Exhausted` where ``limits.drawn`` prompts do not contain enough of them: always with
    none, otherwise only if ``raise_on_exhausted``; the default of the loop above is to train on what
    there is. Raises :class:`StopRequested` when ``stop_requested()`` turns true. Samples still in
    flight at the end are aborted.
    """
    step = _Step(roll_group, keep_group, state, limits)
    try:
        while step.draw() and not step.settled():  # drawn first: carried groups alone may be enough
            if stop_requested():
                raise StopRequested
            await step.judge_finished()
    finally:
        await step.abort_rest()
    chosen = step.chosen()
    if len(chosen) < limits.wanted:
        message = step.exhausted_message(len(chosen))
        if raise_on_exhausted or not chosen:
            raise Exhausted(message)
        log.warning("%s; training on the %d groups there are", message, len(chosen))
    return step.result(chosen)


class _Step:
    """The bookkeeping of one call: what is in flight, what was judged, what to begin next."""

    def __init__(self, roll_group, keep_group, state: CollectState, limits: CollectLimits):
        self.roll_group, self.keep_group = roll_group, keep_group
        self.state, self.limits = state, limits
        self.judged: dict[int, ScoredGroup | None] = dict(state.carried)
        self.in_flight: dict[asyncio.Task, int] = {}
        self.next_to_draw = state.next_ordinal
        self.drawn = 0
        self.finished: list[ScoredGroup] = []
        self.dropped_tokens = 0

    def settled(self) -> bool:
        """Whether the lowest ``wanted`` ordinals that pass are known: no undecided ordinal below the last."""
        kept, ordinal = 0, self.state.next_ordinal
        while ordinal in self.judged:
            kept += self.judged[ordinal] is not None
            if kept == self.limits.wanted:
                return True
            ordinal += 1
        return False

    def draw(self) -> bool:
        """Begins as many groups as the keep rate suggests. False where nothing is left to wait for."""
        while self.may_draw() and self.too_few_expected():
            if self.next_to_draw not in self.judged:
                task = asyncio.ensure_future(self.roll_group(self.next_to_draw))
                self.in_flight[task] = self.next_to_draw
                self.drawn += 1
            self.next_to_draw += 1
        return bool(self.in_flight)

    def may_draw(self) -> bool:
        return len(self.in_flight) < self.limits.in_flight and self.drawn < self.limits.drawn

    def too_few_expected(self) -> bool:
        # A carried group counts once the ordinals below it are begun: skipping one of them would be a bias.
        kept = sum(group is not None for ordinal, group in self.judged.items() if ordinal < self.next_to_draw)
        return kept + len(self.in_flight) * max(self.keep_rate(), 0.01) < self.limits.wanted

    def keep_rate(self) -> float:
        """Last step's rate, corrected by what this step has seen; one step's worth of groups weighs as much."""
        seen = len(self.finished)
        passed = sum(self.judged[group.prompt.ordinal] is not None for group in self.finished)
        return (self.state.keep_rate * self.limits.wanted + passed) / (self.limits.wanted + seen)

    async def judge_finished(self) -> None:
        done, _ = await asyncio.wait(self.in_flight, timeout=STOP_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=self.in_flight.__getitem__):  # a set has no order, a replay needs one
            ordinal = self.in_flight.pop(task)
            group = task.result()
            self.finished.append(group)
            self.judged[ordinal] = group if self.keep_group(group) else None
            if self.judged[ordinal] is None:
                self.dropped_tokens += _tokens(group)

    async def abort_rest(self) -> None:
        for task in self.in_flight:
            task.cancel()
        await asyncio.gather(*self.in_flight, return_exceptions=True)

    def chosen(self) -> list[ScoredGroup]:
        reached = [self.judged[ordinal] for ordinal in sorted(self.judged) if ordinal < self.next_to_draw]
        return [group for group in reached if group is not None][: self.limits.wanted]

    def result(self, chosen: list[ScoredGroup]) -> Collected:
        complete = len(chosen) == self.limits.wanted
        following = chosen[-1].prompt.ordinal + 1 if complete else self.next_to_draw
        surplus = {ordinal: group for ordinal, group in self.judged.items() if ordinal >= following}
        metrics = {
            "collect/prompts_drawn": self.drawn,
            "collect/prompts_dropped": sum(1 for o, g in self.judged.items() if g is None and o < following),
            "collect/keep_rate": self.keep_rate(),
            "collect/dropped_tokens": self.dropped_tokens,
            "collect/surplus_groups": sum(group is not None for group in surplus.values()),
            "collect/aborted_groups": len(self.in_flight),
            "collect/surplus_tokens": sum(_tokens(group) for group in surplus.values() if group is not None),
            "collect/next_ordinal": following,
        }
        return Collected(tuple(chosen), CollectState(following, self.keep_rate(), surplus), metrics)

    def exhausted_message(self, kept: int) -> str:
        dropped = sum(group is None for group in self.judged.values())
        return (
            f"{kept} of the {self.limits.wanted} groups a step needs passed keep_group after {self.drawn} prompts "
            f"({dropped} dropped): the data may be too easy or too hard for the policy; raise "
            "algorithm.filter_groups.max_num_gen_batches or data.gen_batch_size, or change the data"
        )


def _tokens(group: ScoredGroup) -> int:
    return sum(len(trajectory.response_ids) for trajectory in group.trajectories)


def fresh_enough(state: CollectState, oldest_version: int) -> CollectState:
    """The state without carried groups that hold a sample of a policy older than ``oldest_version``.

    Their ordinals are drawn again. So are dropped ones where no carried group is left, as always at staleness 0: the
    next policy judges them, whichever had finished. Beside a carried group a dropped ordinal stays dropped.
    """
    carried = {
        ordinal: group
        for ordinal, group in state.carried.items()
        if group is None or min(t.policy_version for t in group.trajectories) >= oldest_version
    }
    if all(group is None for group in carried.values()):
        carried = {}
    return CollectState(state.next_ordinal, state.keep_rate, carried)
