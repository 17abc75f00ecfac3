"""Collect a step's groups: the lowest ordinals that pass ``keep_group``, whatever finishes first.

An ordinal is a prompt's position in the prompt stream. Groups are begun in the order of their
ordinals. They are scored and filtered as they finish, while others still decode. Which groups a
step trains on depends only on the ordinals and on ``keep_group``: dropping groups that finish late
would silently bias training to short answers. Timing decides only how many ordinals beyond the last
chosen one were begun in vain.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import InputError
from core.types import Dropped, ScoredGroup

log = logging.getLogger(__name__)

GenerateGroup = Callable[[int], Awaitable[ScoredGroup]]  # ordinal -> scored group
KeepGroup = Callable[[ScoredGroup], bool]
STOP_POLL_S = 0.5  # a request to stop is noticed within this time
# may_begin() expects at least this share to pass: a rate near 0 would begin groups without bound
MIN_KEEP_RATE = 0.01


@dataclass(frozen=True)
class CollectState:
    """What collecting carries from one step to the next. A checkpoint stores it."""

    next_ordinal: int = 0
    # Recent share of groups that passed: it decides how many groups are begun at once
    keep_rate: float = 1.0
    # Ordinals from next_ordinal on that an earlier step has answered: each with its group, or with
    # Dropped if keep_group refused it
    carried: Mapping[int, ScoredGroup | Dropped] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectLimits:
    """How many groups a step needs, and how many prompts it may draw for them."""

    wanted: int  # groups a step trains on
    max_in_flight: int  # prompts that are answered at the same time
    max_drawn: int  # prompts that are drawn for one step
    raise_on_exhausted: bool  # if too few groups pass; otherwise the step trains on those there are
    # The message advises to increase it if too few groups pass
    key_to_increase: str = "data.gen_batch_size"


@dataclass(frozen=True)
class Collected:
    """The step's groups in the order of their ordinals, the state for the next step, and counts."""

    groups: tuple[ScoredGroup, ...]
    state: CollectState
    metrics: Mapping[str, float]
    # The ordinals that collect_ahead answers for the steps to come
    ahead_window: range


class Exhausted(InputError):
    """A step drew all the prompts it may and still has too few groups that pass."""


class StopRequested(Exception):
    """The run was asked to stop while it collected; the step has changed nothing yet."""


async def collect_groups(
    generate_group: GenerateGroup,
    keep_group: KeepGroup,
    state: CollectState,
    limits: CollectLimits,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    after_group: Callable[[ScoredGroup | Dropped], None] = lambda group: None,
    steps_ahead: int = 0,
    oldest_version: int = 0,
) -> Collected:
    """Generate groups until the ``limits.wanted`` lowest ordinals that pass are known.

    What is still in flight then is aborted. ``after_group`` is called with each group that was
    filtered, and at first with those that an earlier step has carried here. If ``steps_ahead`` is
    above 0, the result's ``ahead_window`` has the ordinals that are answered next, about enough for
    that many steps. Groups of a policy before ``oldest_version`` are too old for the next step, and
    are not carried to it.

    Raises:
        Exhausted: ``limits.max_drawn`` prompts were drawn and none passed, or fewer than
            ``limits.wanted`` passed and ``raise_on_exhausted`` is set.
        StopRequested: ``stop_requested()`` became true.
    """
    groups = GroupsInProgress(generate_group, keep_group, state, limits)
    next_to_begin = state.next_ordinal
    for group in state.carried.values():
        after_group(group)
    try:
        while True:
            if stop_requested():
                raise StopRequested
            while groups.may_begin(next_to_begin):
                groups.draw(next_to_begin)
                next_to_begin += 1
            # With nothing in flight here, enough groups passed or max_drawn is reached
            if not groups.in_flight or groups.are_enough():
                break
            for group in await groups.filter_finished():
                after_group(group)
    finally:
        await groups.abort()
    # All ordinals up to the last chosen one are decided: are_enough() waits for them, and if too
    # few groups pass, nothing is in flight. So no aborted group could have replaced a chosen one.
    chosen = groups.passed(below=next_to_begin)[: limits.wanted]
    if len(chosen) == limits.wanted:
        next_ordinal = chosen[-1].prompt.ordinal + 1
    else:
        groups.report_exhausted(chosen)
        next_ordinal = next_to_begin
    # Each of the next steps will probably go through as many ordinals as this one
    ordinals_per_step = next_ordinal - state.next_ordinal
    if ordinals_per_step > len(chosen):  # some were dropped: a tenth more, as a reserve
        ordinals_per_step += math.ceil(ordinals_per_step / 10)
    end = next_ordinal + steps_ahead * min(ordinals_per_step, limits.max_drawn)
    if steps_ahead > 0:  # the window reaches all carried groups that are new enough
        for ordinal, group in state.carried.items():
            if group.version >= oldest_version:
                end = max(end, ordinal + 1)
    return groups.result(chosen, next_ordinal, range(next_ordinal, end), oldest_version)


@dataclass(eq=False, repr=False)
class GroupsInProgress:
    """The groups of one collection: in flight, or decided, which means kept or dropped."""

    generate_group: GenerateGroup
    keep_group: KeepGroup
    state: CollectState
    limits: CollectLimits
    decided: dict[int, ScoredGroup | Dropped] = field(init=False)
    in_flight: dict[asyncio.Task, int] = field(default_factory=dict)  # task -> ordinal
    # Prompts drawn for this step. A carried group counts when the step reaches its ordinal.
    drawn: int = 0

    def __post_init__(self) -> None:
        self.decided = dict(self.state.carried)

    def draw(self, ordinal: int) -> None:
        """Count the draw, and begin the group unless an earlier step has carried it here."""
        self.drawn += 1
        if ordinal not in self.decided:
            task = asyncio.ensure_future(self.generate_group(ordinal))
            self.in_flight[task] = ordinal

    async def filter_finished(self) -> list[ScoredGroup | Dropped]:
        """Wait for groups and filter them. Return those that finished.

        They are none after STOP_POLL_S seconds: the caller then looks for a request to stop.
        """
        done, _ = await asyncio.wait(
            self.in_flight.keys(), timeout=STOP_POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        filtered = []
        # By ordinal: a set has no order, and a repeated run has to filter in the same one
        for task in sorted(done, key=lambda task: self.in_flight[task]):
            ordinal = self.in_flight.pop(task)
            group = task.result()
            if not self.keep_group(group):
                group = Dropped(group.version, group.tokens)
            self.decided[ordinal] = group
            filtered.append(group)
        return filtered

    async def abort(self) -> None:
        """Cancel what is in flight and wait until it has ended."""
        await cancel(self.in_flight.keys())

    def passed(self, below: int) -> list[ScoredGroup]:
        """Return the groups that passed and have an ordinal under ``below``, by ordinal."""
        decided = [self.decided[ordinal] for ordinal in sorted(self.decided) if ordinal < below]
        return [group for group in decided if isinstance(group, ScoredGroup)]

    def may_begin(self, ordinal: int) -> bool:
        """Return whether the ordinal is expected to be needed, and may be drawn."""
        if len(self.in_flight) >= self.limits.max_in_flight or self.drawn >= self.limits.max_drawn:
            return False
        # Ignore carried groups above this ordinal: stopping early because of them would skip lower
        # ordinals and bias the step.
        keep_rate = self.keep_rate(self.decided.values())
        expected = len(self.in_flight) * max(keep_rate, MIN_KEEP_RATE)
        return len(self.passed(below=ordinal)) + expected < self.limits.wanted

    def are_enough(self) -> bool:
        """Return whether enough groups passed below the first ordinal that is undecided."""
        first_undecided = self.state.next_ordinal
        while first_undecided in self.decided:
            first_undecided += 1
        return len(self.passed(below=first_undecided)) >= self.limits.wanted

    def keep_rate(self, groups: Collection[ScoredGroup | Dropped]) -> float:
        """Return the keep rate once these groups have counted, which no earlier rate has counted.

        It is the share that passed among them and ``wanted`` imagined ones that pass at the
        previous rate, which smooths it.
        """
        wanted = self.limits.wanted
        num_kept = sum(isinstance(group, ScoredGroup) for group in groups)
        return (self.state.keep_rate * wanted + num_kept) / (wanted + len(groups))

    def report_exhausted(self, chosen: Collection[ScoredGroup]) -> None:
        """Raise Exhausted, or warn if the step may train on the groups there are."""
        message = (
            f"{len(chosen)} of the {self.limits.wanted} groups a step needs passed keep_group "
            f"after {self.drawn} prompts ({self.drawn - len(chosen)} dropped): "
            "the data may be too easy or too hard for the policy; "
            f"increase {self.limits.key_to_increase}, or change the data"
        )
        if self.limits.raise_on_exhausted or not chosen:
            raise Exhausted(message)
        log.warning("%s; training on the %d groups there are", message, len(chosen))

    def result(
        self,
        chosen: Collection[ScoredGroup],
        next_ordinal: int,
        window: range,
        oldest_version: int,
    ) -> Collected:
        """Return the step's outcome. The next step begins at ``next_ordinal``."""
        passed_by = []  # groups that the step is past
        wasted_tokens = 0
        carried = {}
        for ordinal, group in self.decided.items():
            if ordinal < next_ordinal:
                passed_by.append(group)
                continue
            is_new_enough = group.version >= oldest_version
            if is_new_enough:
                carried[ordinal] = group
            # Too old for the next step, or outside the window, so that collect_ahead() does not
            # use it
            if not is_new_enough or ordinal not in window:
                wasted_tokens += group.tokens
        # The groups beyond count in a later step: how many were begun depends on timing
        keep_rate = self.keep_rate(passed_by)
        metrics = {
            "collect/prompts_drawn": self.drawn,
            "collect/prompts_dropped": sum(isinstance(group, Dropped) for group in passed_by),
            "collect/keep_rate": keep_rate,
            "collect/wasted_tokens": wasted_tokens,
            "collect/next_ordinal": next_ordinal,
        }
        state = CollectState(next_ordinal, keep_rate, carried)
        return Collected(tuple(chosen), state, metrics, window)


# -- tasks -----------------------------------------------------------------------------------------


async def results_of(
    work: Iterable[Awaitable[Any]], stop_requested: Callable[[], bool] | None = None
) -> list[Any]:
    """Return the results of all ``work``. If one fails or a stop is requested, cancel the others.

    asyncio.gather would let the others go on after a failure. An engine would then still decode for
    them when its weights change. Raises StopRequested.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
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
        # Also retrieves the exceptions of other failed tasks: asyncio logs any that nobody read
        await cancel(tasks)
    return [task.result() for task in tasks]


async def cancel(tasks: Collection[asyncio.Future]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
