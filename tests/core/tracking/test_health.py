"""Bounds on a run's health: each is crossed by a scripted run, warns or stops, and the last healthy step is kept."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest

from core.checkpoint.run_state import DriverState
from core.command_line import train
from core.config import convert, examine
from core.config.sections.trainer import HealthBound, HealthConfig
from core.tracking.health import CHECKS, SCORE, Health, UnhealthyRun
from core.tracking.metrics import repeated_share
from results.reporting.run_reader import load_run
from results.reporting.summaries import summarise
from tests.core.scripted_run import configured, prepare, scripted

QUIET = HealthConfig(
    nonfinite=HealthBound(),
    entropy_gap=HealthBound(),
    scorer_errors=HealthBound(),
    repetition=HealthBound(),
    unfinished=HealthBound(),
    shortening=HealthBound(),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("health"))


def answers(bad=(), text="3", good="{}"):
    """Groups of unequal answers 0..4, but ``text`` from the versions in ``bad``."""

    def respond(request, version):
        return text if version + 1 in bad else good.format(request.seed % 5)

    return respond


def flatten(value):
    return lambda step, bad=(4, 5): value if step in bad else {}


# check -> (overrides of its bound, what makes steps 4 and 5 unhealthy)
PLANTED = {
    "nonfinite": (["bound=2"], {}, flatten({"actor/skipped_updates": 1.0})),
    "entropy": (["bound=0.05"], {}, flatten({"actor/entropy": 0.01})),
    "reward_drop": (["bound=1.5"], {"bad": (4, 5), "text": "-90"}, flatten({})),
    "logp_diff": (["bound=0.5"], {}, flatten({"rollout_corr/logp_diff_mean": 0.7})),
    "entropy_gap": (["bound=6"], {}, flatten({"rollout_corr/entropy_gap_z": -6.1})),
    "zero_variance": (["bound=0.99"], {"bad": (4, 5)}, flatten({})),
    "repetition": (["bound=0.1"], {"bad": (4, 5), "text": "3333"}, flatten({})),
    "unfinished": (["bound=0.3"], {"bad": (4, 5), "text": "123456789"}, flatten({})),
    "shortening": (["bound=0.1"], {"bad": (4, 5), "text": "3", "good": "000{}"}, flatten({})),
    "scorer_errors": (["bound=0.9"], {"bad": (4, 5), "text": "x"}, flatten({})),
}
WINDOW = {"reward_drop": 2, "scorer_errors": 1}
FIRST = {name: 5 if name == "nonfinite" else 4 for name in PLANTED}  # two steps in a row, one is enough elsewhere


def overrides(name, action, *more):
    bound, _, _ = PLANTED[name]
    keys = [*bound, f"action={action}"]
    rest = [f"trainer.health.reward_window={WINDOW[name]}"] if name in WINDOW else []
    return [*(f"trainer.health.{name}.{key}" for key in keys), *rest, "trainer.save_freq=2", *more]


def test_every_check_is_planted_here():
    assert set(PLANTED) == set(CHECKS)


@pytest.mark.parametrize("name", PLANTED)
def test_crossing_a_bound_stops_after_saving(name, folder):
    _, replies, report = PLANTED[name]
    config = configured(folder, f"stop-{name}", *overrides(name, "stop"))
    run = scripted()(config, answers(**replies), report=report).init_workers()
    with pytest.raises(UnhealthyRun) as stopped:
        run.fit()
    last = FIRST[name]
    assert run.run.step == last and run.run.store.steps()[-1] == last
    text = str(stopped.value)
    assert f"trainer.health.{name}.bound" in text and f"stopped after step {last}" in text
    healthy = 3 if name != "nonfinite" else 4
    assert f"last healthy step is {healthy}" in text
    sound = healthy if healthy % 2 == 0 else healthy - 1
    assert f"global_step_{sound}" in text and f"resume_from_path={run.run.store.folder(sound)}" in text
    manifest = json.loads((run.run.run_dir / "manifest.json").read_text())
    assert manifest["status"] == "stopped" and manifest["last_healthy_step"] == healthy
    assert manifest["stopped_because"] == text
    assert summarise(load_run(run.run.run_dir))["last_healthy_step"] == healthy
    assert load_run(run.run.run_dir).metrics[-1]["health/last_healthy_step"] == healthy
    assert (run.run.run_dir / "nonfinite_step_5.pt").exists() == (name == "nonfinite")


@pytest.mark.parametrize("name", PLANTED)
def test_a_warning_goes_on_and_names_step_and_bound(name, folder, caplog):
    _, replies, report = PLANTED[name]
    config = configured(folder, f"warn-{name}", *overrides(name, "warn"))
    with caplog.at_level(logging.WARNING, logger="core"):
        run = scripted()(config, answers(**replies), report=report).init_workers()
        run.fit()
    said = [record.getMessage() for record in caplog.records if f"trainer.health.{name}.bound" in record.getMessage()]
    assert run.run.step == 6 and said and said[0].startswith(f"step {FIRST[name]}: ")
    crossed = {row["step"]: row["health/crossed_bounds"] for row in load_run(run.run.run_dir).metrics}
    assert crossed[FIRST[name]] == 1 and crossed[FIRST[name] - 1] == 0
    recovers = name not in ("reward_drop", "repetition", "unfinished", "shortening")  # whose windows still hold step 5
    assert run.run.health.last_healthy_step == (6 if recovers else 3)


def test_what_comes_at_every_step_is_said_once_again_when_it_doubles_and_counted(folder, caplog):
    sizes = [0.03, 0.04, 0.03, 0.07, 0.06, 0.05]
    report = lambda step: {"rollout_corr/logp_diff_mean": sizes[step - 1]}  # noqa: E731
    config = configured(folder, "often", "trainer.health.logp_diff.bound=0.02")
    with caplog.at_level(logging.WARNING, logger="core"):
        run = scripted()(config, answers(), report=report).init_workers()
        run.fit()
    said = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "logp_diff" in text]
    assert [text.partition(":")[0] for text in said[:-1]] == ["step 1", "step 4"]
    assert said[-1] == "trainer.health.logp_diff.bound was crossed in 4 more steps, not warned of again"
    assert [row["health/crossed_bounds"] for row in load_run(run.run.run_dir).metrics] == [1.0] * 6


def test_a_bound_that_follows_rounding_is_measured_once_a_run_and_printed(folder, caplog):
    """A resumed run keeps it."""
    report = lambda step: {"rollout_corr/logp_diff_mean": 0.05 if step < 4 else 0.07}  # noqa: E731
    config = configured(folder, "measured", "actor_rollout_ref.rollout.dtype=bf16", "trainer.save_freq=1", steps=3)
    costs = iter([0.03])
    with caplog.at_level(logging.INFO, logger="core"):
        for steps in (3, 5):
            config = convert.replaced(config, {"trainer.total_training_steps": steps})
            run = scripted()(config, answers(), report=report).init_workers()
            run.workers.logprob_noise = lambda text: next(costs) if len(text) > 20 else 0.0
            run.fit()
    assert run.run.health.logp_diff_bound == pytest.approx(0.06)
    said = [record.getMessage() for record in caplog.records if "logp_diff" in record.getMessage()]
    assert said[0].startswith("rounding costs 0.03 nats a token on this model") and "warns above 0.06" in said[0]
    assert [text.partition(":")[0] for text in said[1:2]] == ["step 4"] and len(said) == 3


def test_a_run_within_its_bounds_says_nothing(folder, caplog):
    bounds = [f"trainer.health.{name}.bound={bound}" for name, bound in
              (("entropy", 0.05), ("reward_drop", 3.9), ("zero_variance", 0.99), ("scorer_errors", 0.1))]  # fmt: skip
    config = configured(folder, "well", *bounds, "trainer.health.reward_window=2")
    with caplog.at_level(logging.WARNING, logger="core"):
        run = scripted()(config, answers()).init_workers()
        run.fit()
    assert not [r for r in caplog.records if "trainer.health" in r.getMessage()]
    assert run.run.health.last_healthy_step == 6


def test_memory_and_the_last_healthy_step_survive_a_resume(folder):
    """Steps 2 and 3 lose their update; killed after 2, the resumed run must still count two in a row."""
    lose = lambda step: {"actor/skipped_updates": 1.0} if step in (2, 3) else {}  # noqa: E731
    bounds = ["trainer.health.nonfinite.bound=2", "trainer.save_freq=1", "trainer.health.reward_window=2"]
    first = scripted()(configured(folder, "resumed", *bounds, steps=2), answers(), report=lose).init_workers()
    first.fit()
    assert first.run.health.lost_updates_in_row == 1 and len(first.run.health.recent[SCORE]) == 2
    assert first.run.health.best_score is not None
    state = DriverState.load(first.run.store.folder(2)).values["health"]
    assert Health.of_state(state) == first.run.health and state["last_healthy_step"] == 2
    again = scripted()(configured(folder, "resumed", *bounds), answers(), report=lose).init_workers()
    assert again.run.health == first.run.health
    with pytest.raises(UnhealthyRun, match="The last healthy step is 2: go back"):
        again.fit()
    assert again.run.step == 3


def test_the_command_ends_with_a_line_and_status_one(folder, capsys):
    config = configured(folder, "command", *overrides("entropy", "stop"))
    low = lambda config: scripted()(config, answers(), report=flatten({"actor/entropy": 0.01}))  # noqa: E731
    with pytest.raises(SystemExit) as ended:
        train(low, config)
    assert ended.value.code == 1 and "trainer.health.entropy.bound=0.05" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, values, crossed",
    [
        ("entropy", {"actor/entropy": 0.1}, False),
        ("entropy", {"actor/entropy": 0.0999}, True),
        ("entropy", {}, False),  # a step of critic_warmup has none
        ("logp_diff", {"rollout_corr/logp_diff_mean": 0.1}, False),
        ("logp_diff", {"rollout_corr/logp_diff_mean": 0.1001}, True),
        ("logp_diff", {"rollout_corr/logp_diff_mean": math.nan}, True),
        ("entropy_gap", {"rollout_corr/entropy_gap_z": -0.11}, True),
        ("zero_variance", {"reward/zero_variance_share": 0.11}, True),
        ("scorer_errors", {"reward/failed_rate": 0.11}, True),
        ("scorer_errors", {"reward/failed_rate": 0.1, "reward/wrong_rate": 0.9}, False),
        ("scorer_errors", {}, False),
    ],
)
def test_a_bound_is_crossed_beyond_it(name, values, crossed):
    config = QUIET.replace(**{name: HealthBound(bound=0.1)})
    state, found = Health(last_healthy_step=6).after(7, values, config)
    assert [one.check for one in found] == ([name] if crossed else [])
    assert state.last_healthy_step == (6 if crossed else 7)
    assert Health().after(7, values, QUIET)[1] == []


@pytest.mark.parametrize("bound", [None, 1e-4])
def test_in_float32_a_difference_is_a_fault_of_the_program_whatever_is_corrected(bound):
    config = QUIET.replace(logp_diff=HealthBound(bound=bound))
    for exact, advised in ((1e-4, "fault of the program"), (None, "rollout_correction")):
        _, found = Health().after(1, {"rollout_corr/logp_diff_mean": 2e-4}, config, exact=exact)
        assert [advised in one.text for one in found] == ([True] if exact or bound else [])
        assert not any("rollout_correction" in one.text for one in found if exact)
    assert Health().after(1, {"rollout_corr/logp_diff_mean": 5e-5}, config, exact=1e-4)[1] == []


def test_a_reward_drop_is_measured_from_the_best_window():
    config = QUIET.replace(reward_drop=HealthBound(bound=0.4), reward_window=3)
    state, steps = Health(), []
    for step, score in enumerate([9.0, 0.0, 0.3, 0.6, 0.9, 0.9, 0.9, 0.3, 0.3], start=1):
        state, found = state.after(step, {"critic/score/mean": score}, config)
        steps.append(bool(found))
    # windows: 3.1 (the outlier is in it), 0.3, 0.6, 0.8, 0.9, 0.7, 0.5 -> drops of 2.8, 2.5, 2.3, 2.2, 2.4, 2.6
    assert steps == [False, False, False, True, True, True, True, True, True]
    state, steps = Health(), []
    for step, score in enumerate([0.3, 0.6, 0.9, 0.9, 0.9, 0.3, 0.3], start=1):
        state, found = state.after(step, {"critic/score/mean": score}, config)
        steps.append(bool(found))
    assert steps == [False, False, False, False, False, False, False]  # 0.9 - 0.5 is not beyond 0.4 but for rounding
    assert state.best_score == pytest.approx(0.9)


def test_repetition_is_measured_from_the_first_steps_and_survives_a_checkpoint():
    config = QUIET.replace(repetition=HealthConfig().repetition)
    state, steps = Health(), []
    for step, value in enumerate([0.30, 0.35, 0.25, 0.40, 0.50, 0.55, 0.60, 0.30, 0.30], start=1):
        state, violations = state.after(step, {"response/repeated_trigrams": value}, config)
        state = Health.of_state(json.loads(json.dumps(state.state_dict())))
        steps.append(bool(violations))
    # means of three steps from the third: .3, .33, .38, .48, .55, .48, .4; bound: .2 above the first
    assert steps == [False, False, False, False, False, False, True, False, False]


def test_answers_that_become_short_are_told_by_their_share_of_the_first_steps_length():
    config = QUIET.replace(shortening=HealthConfig().shortening)
    state, findings = Health(), []
    for step, length in enumerate([30, 36, 33, 30, 27, 24, 18, 12, 12], start=1):
        state, violations = state.after(step, {"response_length/mean": length}, config)
        findings.append([violation.text for violation in violations])
    # means of three steps from the third: 33, 33, 30, 27, 23, 18, 14; the bound is half of 33, which is 16.5
    assert [bool(texts) for texts in findings] == [False] * 8 + [True]
    assert "58% shorter" in findings[8][0] and "trainer.health.shortening.bound=0.5" in findings[8][0]
    empty = Health()
    for step in range(1, 6):  # answers of nothing at the start have no length to fall from
        empty, violations = empty.after(step, {"response_length/mean": 0.0}, config)
        assert violations == []


def test_repeated_trigrams():
    assert repeated_share(np.array([1, 2, 3, 4, 5])) == 0
    assert repeated_share(np.array([7] * 12)) == pytest.approx(0.9)  # one of ten is new
    assert repeated_share(np.array([1, 2, 3, 1, 2, 3])) == pytest.approx(0.25)
    assert repeated_share(np.array([1, 2])) == 0


def test_failures_of_a_scorer_count_over_a_window_that_a_checkpoint_keeps():
    config = QUIET.replace(scorer_errors=HealthConfig().scorer_errors, reward_window=4)
    state, steps = Health(), []
    for step, share in enumerate([0.0, 0.1, 0.1, 0.2, 0.0, 0.2, 0.0, 0.0], start=1):
        state, found = state.after(step, {"reward/failed_rate": share}, config)
        state = Health.of_state(json.loads(json.dumps(state.state_dict())))
        steps.append(bool(found))
    # means over 4 steps: 0, .05, .067, .1, .1, .125, .1, .05
    assert steps == [False, False, False, False, False, True, False, False]


@pytest.mark.parametrize(
    "settings, bound",
    [
        (["actor_rollout_ref.rollout.dtype=fp32", "actor_rollout_ref.actor.fsdp_config.dtype=fp32"], 1e-4),
        (["actor_rollout_ref.rollout.dtype=bf16", "actor_rollout_ref.actor.fsdp_config.dtype=fp32"], None),
        (["algorithm.rollout_correction.rollout_is=token"], None),
        (["algorithm.rollout_correction.rollout_is=token", "trainer.health.logp_diff.bound=0.3"], 0.3),
    ],
)
def test_the_mismatch_has_a_bound_by_precision_unless_it_is_weighed_for(settings, bound):
    assert examine("grpo", ["preset=lab", *settings]).config.trainer.health.logp_diff.bound == bound


def test_what_is_off_is_listed():
    off = ["trainer.health.scorer_errors.bound=null", "trainer.health.reward_window=5"]
    inert = examine("grpo", ["preset=lab", "trainer.health.entropy.action=stop", *off]).unused
    assert set(inert) == {"trainer.health.entropy.action", "trainer.health.reward_window"}
