"""Some steps off-policy: the next collection behind the update, the same outcome whatever the timing,
nothing lost."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import shutil
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.data.draw_order import derive_seed, sampling_seed
from core.rollout.collect import CollectLimits, CollectState, collect_groups
from core.rollout.collect_ahead import answer_window
from recipes.dapo.dapo_ray_trainer import RayDAPOTrainer
from results.reporting.run_reader import load_run
from tests.core.rollout.test_collect import Rollouts
from tests.core.scripted_run import configured, prepare, scripted
from tests.scripted_engine import random_latency

P, STEPS = 4, 7
STALE = ("trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=token")


def passes(ordinal: int, version: int, share: float) -> bool:
    return random.Random(f"{version}/{ordinal}").random() < share


def written_out(steps: int, passing, staleness: int = 1, ends: bool = False):
    """(ordinal, version) of every group of every step, written out without a clock: for each of
    the ``staleness`` steps to come as many ordinals as this one went through, and a tenth, belong to
    the policy before this step's update, or to the one that answered them before. With ``ends`` no
    step looks beyond the last one."""
    first, answered, trained = 0, {}, []
    for step in range(1, steps + 1):
        chosen, ordinal = [], first
        while len(chosen) < P:
            version = answered.get(ordinal, step - 1)
            if passing(ordinal, version):
                chosen.append((ordinal, version))
            ordinal += 1
        trained.append(chosen)
        window = ordinal - first
        window += math.ceil(window / 10) if window > P else 0
        first = ordinal
        usable = {o: v for o, v in answered.items() if o >= first and v >= step - staleness}
        ahead = min(staleness, steps - step) if ends else staleness
        end = max(first + ahead * window, *(o + 1 for o in usable), 0) if ahead else first
        answered = {o: usable.get(o, step - 1) for o in range(first, end)} or usable
    return trained


@settings(max_examples=30, deadline=None)
@given(
    timing=st.integers(0, 10**6),
    share=st.floats(0.2, 1.0),
    in_flight=st.integers(1, 20),
    stop_after=st.integers(0, STEPS),
    staleness=st.integers(1, 4),
)
def test_ordinals_and_their_versions_do_not_depend_on_timing(
    timing, share, in_flight, stop_after, staleness
):
    """Verdicts depend on the policy here, so a sample of another version than expected would change
    what is trained."""
    state, trained, limits = CollectState(), [], CollectLimits(P, in_flight, 10_000, True)

    def keep(g):
        return passes(g.prompt.ordinal, g.version, share)

    async def two_phases(rollouts, state, oldest):
        """A step's collection, then that of later ones with the same policy, on one event loop."""
        options = {"steps_ahead": staleness, "oldest_version": oldest}
        collected = await collect_groups(rollouts, keep, state, limits, **options)
        return collected, await answer_window(rollouts, keep, collected, limits)

    for step in range(1, STEPS + 1):
        rollouts = Rollouts(timing + step, version=step - 1, longest=60)
        start = state.next_ordinal
        collected, state = asyncio.run(two_phases(rollouts, state, step - staleness))
        trained.append([(g.prompt.ordinal, g.version) for g in collected.groups])
        assert all(g.version >= step - 1 - staleness for g in collected.groups)
        assert rollouts.most_in_flight <= in_flight
        finished = list(rollouts.begun)
        for ordinal in rollouts.aborted:
            finished.remove(ordinal)
        assert len(finished) == len(set(finished))
        assert list(state.carried) == list(collected.ahead_window)
        assert (
            state.next_ordinal == collected.ahead_window.start >= start + P
            and len(collected.ahead_window) >= staleness * P
        )
        versions = {verdict.version for verdict in state.carried.values()}
        assert step - staleness <= min(versions) and max(versions) <= step - 1
        if step == stop_after:  # killed and resumed: only the state is left
            state = CollectState(state.next_ordinal, state.keep_rate, dict(state.carried))
    passing = functools.partial(passes, share=share)
    assert trained == written_out(STEPS, passing, staleness)


def test_where_nothing_is_dropped_each_sample_is_as_old_as_staleness_says():
    for staleness in (1, 2, 4):
        trained = written_out(STEPS, lambda ordinal, version: True, staleness)
        versions = [{version for _, version in groups} for groups in trained]
        assert versions == [{max(0, step - staleness)} for step in range(STEPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("overlap"))


class Trainer(scripted(RayDAPOTrainer)):
    def complete_step(self, groups_P, batch, metrics):
        self.details = [
            *getattr(self, "details", []),
            [(g.prompt.ordinal, g.version) for g in groups_P],
        ]
        super().complete_step(groups_P, batch, metrics)


def answers(request, version):
    """0 or 1, another one from every policy: about half of the groups of two pass."""
    return str(derive_seed("answer", request.seed, version) % 2)


def mixed(ordinal: int, version: int) -> bool:
    seeds = [sampling_seed(1, ordinal, index) for index in range(2)]
    return len({derive_seed("answer", seed, version) % 2 for seed in seeds}) == 2


def fit(folder, name, *overrides, timing=0, overlapping=False, steps=STEPS):
    config = configured(
        folder, name, "algorithm.filter_groups.enable=True", "data.gen_batch_size=6", "trainer.save_freq=1",
        "reward_model.overlong_buffer.enable=False", *overrides, steps=steps, recipe="dapo",
    )  # fmt: skip
    run = Trainer(config, answers, random_latency(timing))
    run.init_workers()
    run.workers.generates_while_learning = overlapping  # another thread collects during the update
    run.fit()
    return run


@pytest.mark.parametrize(("overlapping", "staleness"), [(False, 1), (True, 1), (True, 3)])
def test_a_run_trains_the_same_whatever_the_timing_and_wherever_it_collects(
    folder, overlapping, staleness
):
    keys = (f"trainer.max_staleness={staleness}", STALE[1])
    runs = [
        fit(
            folder,
            f"t{overlapping}{staleness}{timing}",
            *keys,
            timing=timing,
            overlapping=overlapping,
        )
        for timing in (1, 2)
    ]
    for run in runs:
        assert run.details == written_out(STEPS, mixed, staleness, ends=True)
    ages = [
        step - 1 - version
        for step, one in enumerate(runs[0].details, start=1)
        for _, version in one
    ]
    assert set(ages) == {*range(staleness + 1)}
    rows = load_run(runs[0].run.run_dir).metrics
    assert all(
        ("timing_s/wait_ahead" in row) == (overlapping and row["step"] < STEPS) for row in rows
    )


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(folder):
    keys = ("trainer.max_staleness=3", STALE[1])
    whole = fit(folder, "whole", *keys)
    for killed_after in (1, 4, 6):
        part = folder / f"part{killed_after}"
        shutil.copytree(whole.run.run_dir, part)
        # What a process killed in the next step leaves
        for step in range(killed_after + 1, STEPS + 1):
            shutil.rmtree(part / f"global_step_{step}")
        (part / "latest_checkpointed_iteration.txt").write_text(str(killed_after))
        again = fit(folder, part.name, *keys, timing=5)
        assert whole.details[killed_after:] == again.details


def test_a_run_that_goes_on_without_staleness_trains_no_answer_of_an_older_policy(folder):
    stale = fit(folder, "stale", *STALE, steps=3)
    assert stale.run.state.collect_state.carried == {}  # the last step looks no further
    part = folder / "turned"
    shutil.copytree(stale.run.run_dir, part)
    shutil.rmtree(part / "global_step_3")
    (part / "latest_checkpointed_iteration.txt").write_text("2")
    turned = fit(
        folder, part.name, "trainer.max_staleness=0", "trainer.resume_with_changes=True", steps=4
    )
    assert [{version for _, version in one} for one in turned.details] == [{2}, {3}]


@pytest.mark.parametrize("overlapping", [False, True])
def test_the_step_that_uses_the_last_prompt_of_the_epochs_answers_none_ahead(folder, overlapping):
    """Groups are dropped, so it comes before the number of steps that the prompts allow."""
    keys = (*STALE, "trainer.total_training_steps=null", "trainer.total_epochs=1")
    run = fit(folder, f"epochs{overlapping}", *keys, overlapping=overlapping)
    rows = load_run(run.run.run_dir).metrics
    assert 1 < len(rows) == run.run.step < run.run.total_steps
    ahead = "timing_s/wait_ahead" if overlapping else "timing_s/gen_ahead"
    assert [ahead in row for row in rows] == [True] * (len(rows) - 1) + [False]


def test_on_policy_nothing_is_collected_ahead(folder):
    run = fit(folder, "on-policy", steps=3)
    assert all(
        step - 1 == version for step, one in enumerate(run.details, start=1) for _, version in one
    )
    assert (
        not run.state.collect_state.carried
        and "timing_s/gen_ahead" not in load_run(run.run.run_dir).metrics[0]
    )


def test_a_fault_in_the_update_or_the_collection_ends_the_other_too(folder):
    def report(step):
        if step == 2:
            raise RuntimeError("a learner died")
        return {}

    def respond(request, version):
        if version == 1:
            raise RuntimeError("an engine died")
        return "1"

    # A fault in the collection surfaces once the step that trains beside it is complete
    cases = ((lambda *_: "1", report, "a learner", 1), (respond, lambda step: {}, "an engine", 2))
    for answer, reported, died, complete in cases:
        run = scripted()(
            configured(folder, died, *STALE), answer, random_latency(0), reported
        ).init_workers()
        run.workers.generates_while_learning = True
        with pytest.raises(RuntimeError, match=f"{died} died"):
            run.fit()
        assert run.run.step == complete
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncio")]


ALARM = """
import signal
def compute_score(solution_str, **rest):
    signal.setitimer(signal.ITIMER_REAL, 30)
    before = signal.signal(signal.SIGALRM, lambda *_: None)  # refused outside of the main thread
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    return float(solution_str)
"""


def test_answers_ahead_are_graded_where_a_function_may_use_signals(folder, tmp_path):
    (tmp_path / "alarm.py").write_text(ALARM)
    function = f"custom_reward_function.path={tmp_path}/alarm.py"
    run = scripted()(
        configured(folder, "alarm", *STALE, function, steps=3), lambda *_: "1"
    ).init_workers()
    run.workers.generates_while_learning = True
    run.fit()
    rows = load_run(run.run.run_dir).metrics
    assert [(row.get("reward/failed_rate", 0.0), row["critic/score/mean"]) for row in rows] == [
        (0.0, 1.0)
    ] * 3
