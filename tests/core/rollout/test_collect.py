"""Selection by ordinal, whatever finishes first; bounded; nothing lost or trained twice."""

import asyncio
import gc
import random
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.rollout.collect import (
    CollectLimits,
    CollectState,
    Exhausted,
    StopRequested,
    collect_groups,
    results_of,
)
from core.types import Dropped, Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score


def group(ordinal: int, length: int = 3, version: int = 0) -> ScoredGroup:
    prompt = Prompt(ordinal, f"q{ordinal}", (1, 2), (), "a", "test")
    trajectory = Trajectory(
        [1, 2], [5] * length, [True] * length, [-1.0] * length, (), Stop.EOS, version, 0
    )
    return ScoredGroup(prompt, (trajectory,), (Score(1.0),))


class Rollouts:
    """Groups that take a random number of turns of the event loop; remembers what was begun and
    aborted."""

    def __init__(self, seed: int, version: int = 0, longest: int = 30):
        self.random = random.Random(seed)
        self.version, self.longest = version, longest
        self.begun, self.aborted, self.most_in_flight, self.in_flight = [], [], 0, 0

    async def __call__(self, ordinal: int) -> ScoredGroup:
        self.begun.append(ordinal)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for _ in range(self.random.randrange(self.longest)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.aborted.append(ordinal)
            raise
        finally:
            self.in_flight -= 1
        return group(ordinal, length=1 + ordinal % 7, version=self.version)


def passes(share: float, seed: int = 0):
    """A predicate that is a function of the ordinal, as it is when the policy stands still."""
    return lambda g: random.Random(f"{seed}/{g.prompt.ordinal}").random() < share


def run(
    rollouts,
    keep,
    state=None,
    wanted=5,
    in_flight=8,
    drawn=10_000,
    raise_on_exhausted=True,
    **kwargs,
):
    limits = CollectLimits(wanted, in_flight, drawn, raise_on_exhausted)
    return asyncio.run(collect_groups(rollouts, keep, state or CollectState(), limits, **kwargs))


def lowest(keep, first, wanted, version=0):
    """Return the lowest ordinals that pass, without a clock."""
    return list(islice((o for o in count(first) if keep(group(o, version=version))), wanted))


def ordinals(collected):
    return [g.prompt.ordinal for g in collected.groups]


@settings(max_examples=30, deadline=None)
@given(
    timing=st.integers(0, 10**6),
    share=st.floats(0.15, 1.0),
    wanted=st.integers(1, 9),
    in_flight=st.integers(1, 30),
    keep_rate=st.floats(0.01, 1.0),
)
def test_the_lowest_ordinals_that_pass_are_chosen_whatever_the_timing(
    timing, share, wanted, in_flight, keep_rate
):
    keep, state = passes(share), CollectState(next_ordinal=3, keep_rate=keep_rate)
    rollouts = Rollouts(timing)
    result = run(rollouts, keep, state, wanted, in_flight)
    expected = lowest(keep, 3, wanted)
    assert ordinals(result) == expected
    assert result.state.next_ordinal == expected[-1] + 1
    assert rollouts.most_in_flight <= in_flight
    assert len(rollouts.begun) == len(set(rollouts.begun))
    again = Rollouts(timing)
    run(again, keep, state, wanted, in_flight)
    assert again.begun == rollouts.begun, "a replay begins the same groups in the same order"


@settings(max_examples=20, deadline=None)
@given(timing=st.integers(0, 10**6), share=st.floats(0.2, 1.0), carries=st.booleans())
def test_over_many_steps_each_passing_ordinal_is_trained_once_and_none_is_skipped(
    timing, share, carries
):
    keep, state, trained = passes(share), CollectState(), []
    for step in range(8):
        rollouts = Rollouts(timing + step, version=step, longest=60)
        result = run(rollouts, keep, state, wanted=4, in_flight=9)
        trained += ordinals(result)
        state = result.state if carries else CollectState(result.state.next_ordinal)
    assert trained == lowest(keep, 0, 32)


@settings(max_examples=30, deadline=None)
@given(timing=st.integers(0, 10**6), share=st.floats(0.2, 0.9))
def test_without_staleness_each_step_s_own_policy_judges_every_ordinal(timing, share):
    """A surplus ordinal that the last policy dropped, if it had finished, must not be lost to the
    next one."""

    def keep(g):
        return random.Random(f"{g.version}/{g.prompt.ordinal}").random() < share

    state, following = CollectState(), 0
    for step in range(6):
        expected = lowest(keep, following, 4, version=step)
        rollouts = Rollouts(timing + step, version=step, longest=60)
        result = run(rollouts, keep, state, wanted=4, in_flight=9)
        assert ordinals(result) == expected
        state, following = CollectState(result.state.next_ordinal), expected[-1] + 1


def test_carried_groups_do_not_jump_over_undecided_ordinals():
    carried = {7: group(7), 5: Dropped(0, 3)}
    result = run(Rollouts(1), lambda g: True, CollectState(4, 1.0, carried), wanted=3)
    assert ordinals(result) == [4, 6, 7]
    rollouts = Rollouts(1)
    carried = {4: Dropped(0, 3), 5: group(5), 6: Dropped(0, 3), 7: group(7), 8: group(8)}
    result = run(rollouts, lambda g: True, CollectState(4, 1.0, carried), wanted=2)
    assert ordinals(result) == [5, 7] and not rollouts.begun  # they alone are enough
    assert result.state.next_ordinal == 8 and list(result.state.carried) == [8]


def test_without_a_filter_exactly_the_wanted_groups_are_begun():
    rollouts = Rollouts(0)
    result = run(rollouts, lambda g: True, wanted=6, in_flight=100)
    assert sorted(rollouts.begun) == list(range(6)) and not rollouts.aborted
    assert (
        result.metrics["collect/wasted_tokens"] == 0
        and result.metrics["collect/prompts_drawn"] == 6
    )


def test_exhausted_trains_on_what_there_is_or_raises_with_counts():
    keep = passes(0.2)
    rollouts = Rollouts(0)
    result = run(rollouts, keep, wanted=20, in_flight=10, drawn=30, raise_on_exhausted=False)
    assert ordinals(result) == [o for o in range(30) if keep(group(o))]
    assert result.state.next_ordinal == 30 and len(rollouts.begun) == 30
    with pytest.raises(Exhausted, match=r"20 groups.*after 30 prompts.*gen_batch_size"):
        run(Rollouts(0), keep, wanted=20, in_flight=10, drawn=30)
    carried = {ordinal: Dropped(0, 5) for ordinal in (3, 40, 41)}  # it draws the first of them
    with pytest.raises(Exhausted, match=r"after 12 prompts \(12 dropped\)"):
        run(
            Rollouts(0),
            lambda g: False,
            CollectState(0, 1.0, carried),
            wanted=3,
            in_flight=10,
            drawn=12,
        )
    with pytest.raises(Exhausted, match="0 of the 3"):
        run(
            Rollouts(0), lambda g: False, wanted=3, in_flight=10, drawn=12, raise_on_exhausted=False
        )


@settings(max_examples=20, deadline=None)
@given(timing=st.integers(0, 10**6), num_carried=st.integers(0, 9))
def test_the_keep_rate_counts_what_the_step_is_past_whatever_the_timing(timing, num_carried):
    keep = passes(0.5)
    carried = {o: group(o) if keep(group(o)) else Dropped(0, 1) for o in range(num_carried)}
    result = run(Rollouts(timing), keep, CollectState(0, 0.5, carried), wanted=4, in_flight=9)
    past = result.state.next_ordinal
    expected = (0.5 * 4 + 4) / (4 + past)
    assert result.state.keep_rate == pytest.approx(expected)
    assert result.metrics["collect/keep_rate"] == result.state.keep_rate
    assert result.metrics["collect/prompts_dropped"] == past - 4


def test_what_is_filtered_is_told_and_at_first_what_was_carried_here():
    keep = passes(0.5)
    carried = {0: group(0), 1: Dropped(0, 1)}
    told = []
    result = run(
        Rollouts(0), keep, CollectState(0, 1.0, carried), wanted=4, after_group=told.append
    )
    assert told[:2] == [*carried.values()]
    passed = {each.prompt.ordinal for each in told if isinstance(each, ScoredGroup)}
    assert passed >= set(ordinals(result))
    assert all(keep(group(o)) for o in passed - {0})
    assert sum(isinstance(each, Dropped) for each in told) > 1


def test_a_fault_in_a_rollout_and_a_request_to_stop_abort_the_others():
    rollouts = Rollouts(0, longest=1000)

    async def roll(ordinal):
        if ordinal == 2:
            await asyncio.sleep(0)
            raise RuntimeError("engine died")
        return await rollouts(ordinal)

    with pytest.raises(RuntimeError, match="engine died"):
        run(roll, lambda g: True, wanted=8)
    assert rollouts.in_flight == 0
    rollouts.begun.clear()
    with pytest.raises(StopRequested):
        run(rollouts, lambda g: True, stop_requested=lambda: len(rollouts.begun) >= 5)
    assert rollouts.in_flight == 0


def test_a_lost_engine_fails_every_answer_and_is_reported_once():
    """What asyncio reports of the others is a traceback behind the run's last line."""
    reported = []

    async def fail(number: int) -> None:
        raise ConnectionError(number)

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reported.append(report))
        with pytest.raises(ConnectionError):
            await results_of(map(fail, range(3)))
        gc.collect()

    asyncio.run(ask())
    assert reported == []
