"""Bounds on a run's health: each is crossed by a scripted run, warns or stops, and the last healthy
step is kept."""

from __future__ import annotations

import dataclasses
import json
import logging
import math

import pytest

from core.checkpoint.run_state import DriverState
from core.command_line import train
from core.config.schema import HealthConfig
from core.errors import UnhealthyRun
from core.tracking.health import CHECKS, SCORE, SKIPPED, Health
from results.reporting.run_reader import load_run
from results.reporting.summaries import summarise
from tests.core.scripted_run import configured, prepare, scripted


def bounded(window: int = 10, **bounds: float | None) -> HealthConfig:
    """A configuration in which these checks alone are on."""
    return HealthConfig(
        reward_window=window, **{name: {"bound": bounds.get(name)} for name in CHECKS}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("health"))


def answers(bad=(), text="3", spared=False):
    """Groups of unequal answers 0..4, but ``text`` from the versions in ``bad``, with a fifth
    ``spared``."""

    def respond(request, version):
        digit = request.seed % 5
        return text if version + 1 in bad and not (spared and digit == 0) else str(digit)

    return respond


def at(name, value, steps=(4, 5)):
    return lambda step: {name: value} if step in steps else {}


# check -> (its bound, what makes steps 4 and 5 unhealthy: other answers, or a number of the update)
PLANTED = {
    "nonfinite": (2, {}, at("actor/skipped_updates", 1.0)),
    "entropy": (0.05, {}, at("actor/entropy", 0.01)),
    "reward_drop": (1.5, {"bad": (4, 5), "text": "-90"}, at("", 0, ())),
    "logp_diff": (0.5, {}, at("rollout_corr/logp_diff_mean", 0.7)),
    "entropy_gap": (6, {}, at("rollout_corr/entropy_gap_z", -6.1)),
    "zero_variance": (0.99, {"bad": (4, 5)}, at("", 0, ())),
    "scorer_errors": (0.5, {"bad": (4, 5), "text": "x", "spared": True}, at("", 0, ())),
}
WINDOW = {"reward_drop": 2, "scorer_errors": 1}


def run_of(folder, name):
    bound, replies, report = PLANTED[name]
    keys = [f"trainer.health.{name}.bound={bound}", "trainer.save_freq=2"]
    keys += [f"trainer.health.reward_window={WINDOW[name]}"] if name in WINDOW else []
    return scripted()(configured(folder, name, *keys), answers(**replies), report=report)


def test_updates_that_are_skipped_stop_the_run_after_saving(folder):
    run = run_of(folder, "nonfinite").init_workers()
    with pytest.raises(UnhealthyRun) as stopped:
        run.fit()
    assert run.run.step == 5 and run.run.store.steps()[-1] == 5
    text = str(stopped.value)
    assert "trainer.health.nonfinite.bound" in text and "last healthy step is 4" in text
    manifest = json.loads((run.run.run_dir / "manifest.json").read_text())
    assert manifest["status"] == "stopped" and manifest["last_healthy_step"] == 4
    assert manifest["stopped_because"] == text
    assert summarise(load_run(run.run.run_dir))["last_healthy_step"] == 4


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - {"nonfinite"}))
def test_a_warning_goes_on_and_names_step_and_bound(name, folder, caplog):
    with caplog.at_level(logging.WARNING, logger="core"):
        run = run_of(folder, name).init_workers()
        run.fit()
    told = [
        record.getMessage()
        for record in caplog.records
        if f"trainer.health.{name}.bound" in record.getMessage()
    ]
    assert run.run.step == 6 and told and told[0].startswith(f"step {4}: ")
    crossed = {
        row["step"]: row["health/crossed_bounds"] for row in load_run(run.run.run_dir).metrics
    }
    assert crossed[4] == 1 and crossed[3] == 0
    # Whose window still holds step 5
    assert run.run.health.last_healthy_step == (3 if name == "reward_drop" else 6)


def test_what_comes_at_every_step_is_told_once_and_again_after_a_healthy_step(folder, caplog):
    sizes = [0.03, 0.04, 0.03, 0.01, 0.06, 0.05]
    report = lambda step: {"rollout_corr/logp_diff_mean": sizes[step - 1]}  # noqa: E731
    config = configured(folder, "often", "trainer.health.logp_diff.bound=0.02")
    with caplog.at_level(logging.WARNING, logger="core"):
        run = scripted()(config, answers(), report=report).init_workers()
        run.fit()
    told = [
        text for text in map(logging.LogRecord.getMessage, caplog.records) if "logp_diff" in text
    ]
    assert [text.partition(":")[0] for text in told] == ["step 1", "step 5"]
    assert [row["health/crossed_bounds"] for row in load_run(run.run.run_dir).metrics] == [
        1,
        1,
        1,
        0,
        1,
        1,
    ]


def test_a_run_that_cannot_learn_is_warned_of_once(folder, caplog):
    with caplog.at_level(logging.WARNING, logger="core"):
        scripted()(configured(folder, "stuck"), answers((2, 3, 4, 5))).init_workers().fit()
    told = [r.getMessage() for r in caplog.records if "steps in a row" in r.getMessage()]
    assert (
        len(told) == 1
        and told[0].startswith("step 4: in 3 steps in a row 100% of the ")
        and "rollout.n" in told[0]
    )


@pytest.mark.parametrize(
    "name, key",
    [
        ("response_length/clip_ratio", "data.max_response_length"),
        ("reward/parse_error_rate", "custom_reward_function.path"),
    ],
)
def test_the_likeliest_key_is_named_where_nothing_can_be_learned(name, key):
    health, told = Health(), []
    for step, share in enumerate([1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0], start=1):
        health.check(step, {name: share, "reward/zero_variance_share": share}, bounded())
        told.append(health.stuck())
    assert [bool(one) for one in told] == [False] * 5 + [True, False] and key in told[5]


# Scores of twelve steps, which a third of 36 are; and what the policy did
FLAT = [0.3, 0.34, 0.27, 0.33, 0.29, 0.31, 0.3, 0.28, 0.33, 0.27, 0.32, 0.31]
RISING = [0.1 + step / 20 for step in range(12)]
STILL = {"actor/ppo_kl": 1e-6, "actor/pg_clipfrac": 0.0}
MOVING = {"actor/ppo_kl": 4e-3, "actor/pg_clipfrac": 0.02}
STEADY = [1.0, 1.01] * 6
COLLAPSING = [2.0 * 0.6**step for step in range(12)]


@pytest.mark.parametrize(
    "scores, entropies, policy, advice",
    [
        (FLAT, STEADY, STILL, "too small"),
        (FLAT, STEADY, MOVING, None),
        (FLAT, [1 + step / 100 for step in range(12)], STILL, None),  # a slow drift is movement
        (FLAT, STEADY, {**STILL, "actor/kl_loss": 0.01}, None),
        (FLAT, STEADY, {**STILL, "reward/zero_variance_share": 1.0}, None),
        # 95 % of equal scores were never a step of all equal ones, and no other check spoke
        (FLAT, STEADY, {**STILL, "reward/zero_variance_share": 0.95}, "equal scores"),
        # Without groups, as in PPO with one answer a question
        (FLAT, STEADY, {**STILL, "reward/zero_variance_share": None}, "too small"),
        # A drift of a thousandth, in a batch so large that its noise is smaller
        (FLAT, [1 + step / 10_000 for step in range(12)], STILL, "too small"),
        (RISING, STEADY, STILL, None),
        (RISING[::-1], STEADY, STILL, None),
        (
            [*FLAT[:6], *(score - 0.03 for score in FLAT[6:])],
            STEADY,
            STILL,
            None,
        ),  # a score that falls, in its noise
        (FLAT, [0.8, 1.3] * 6, STILL, None),  # the policy is thrown about
        (FLAT, STEADY, {"actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0}, "too small"),
        (FLAT, COLLAPSING, MOVING, "too large"),
        (RISING[::-1], COLLAPSING, MOVING, "too large"),
        (RISING, COLLAPSING, MOVING, None),  # a policy that has learnt is sure
    ],
)
def test_a_learning_rate_that_moves_nothing_or_too_much_is_named_once(
    scores, entropies, policy, advice
):
    health = Health()
    texts = []
    for step, (score, entropy) in enumerate(zip(scores, entropies, strict=True), 1):
        values = {SCORE: score, "actor/entropy": entropy, "actor/lr": 1e-6}
        values = {"reward/zero_variance_share": 0.2, **values, **policy}
        values = {name: value for name, value in values.items() if value is not None}
        health.check(step, values, bounded())
        texts.append(health.flat_advice(36, values))
    assert texts[:-1] == [None] * 11
    if advice is None:
        assert texts[-1] is None
    elif advice == "equal scores":
        assert "rollout.n" in texts[-1] and "has not risen" in texts[-1] and "95%" in texts[-1]
    else:
        assert texts[-1].startswith("actor_rollout_ref.actor.optim.lr=1e-06: may be " + advice)


def test_a_rate_that_proves_too_large_later_is_named_then():
    health = Health()
    texts = []
    for step in range(24):
        entropy = 1.0 if step < 12 else 0.5 ** (step - 11)
        values = {SCORE: FLAT[step % 12], "actor/entropy": entropy, **MOVING}
        health.check(step + 1, values, bounded())
        texts.append(health.flat_advice(36, values))
    assert texts[:-1] == [None] * 23 and "may be too large" in texts[-1]


@pytest.mark.parametrize("dropped, advised", [(0, True), (5, False)])
def test_a_score_that_stays_flat_while_the_policy_moves_is_named_late(dropped, advised):
    """Not where groups were dropped: the mean of what is left stays in the middle."""
    health = Health()
    texts = []
    for step in range(36):
        values = {SCORE: FLAT[step % 12], "actor/entropy": STEADY[step % 12], **MOVING}
        values["collect/prompts_dropped"] = dropped
        health.check(step + 1, values, bounded())
        texts.append(health.flat_advice(36, values))
    assert [step for step, text in enumerate(texts, 1) if text] == [24] * advised
    assert not advised or "although the policy moves" in texts[23]


def test_a_run_of_a_handful_of_steps_says_nothing_of_its_learning_rate():
    health = Health()
    for step in range(1, 8):
        values = {SCORE: FLAT[step], "actor/entropy": STEADY[step], **STILL}
        health.check(step, values, bounded())
        assert health.flat_advice(8, values) is None


def test_memory_and_the_last_healthy_step_survive_a_resume(folder):
    """Steps 2 and 3 lose their update; killed after 2, the resumed run must still count two in a
    row."""
    lose = at("actor/skipped_updates", 1.0, (2, 3))
    bounds = [
        "trainer.health.nonfinite.bound=2",
        "trainer.save_freq=1",
        "trainer.health.reward_window=2",
    ]
    first = scripted()(
        configured(folder, "resumed", *bounds, steps=2), answers(), report=lose
    ).init_workers()
    first.fit()
    assert first.run.health.history[SKIPPED] == [0, 1] and len(first.run.health.history[SCORE]) == 2
    saved = DriverState.load(first.run.store.folder(2), first.run.stream.prompt)
    assert saved.values["health"]["last_healthy_step"] == 2
    again = scripted()(
        configured(folder, "resumed", *bounds), answers(), report=lose
    ).init_workers()
    assert again.run.health == first.run.health
    with pytest.raises(UnhealthyRun, match="last healthy step is 2"):
        again.fit()
    assert again.run.step == 3


def test_the_command_ends_with_a_line_and_status_one(tmp_path, capsys):
    run = run_of(prepare(tmp_path), "nonfinite")
    with pytest.raises(SystemExit) as ended:
        train(lambda _: run, run.config)
    assert ended.value.code == 1 and "trainer.health.nonfinite.bound=2" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_step_whose_every_update_was_skipped_is_not_healthy(part):
    """Its weights are those of the step before; one whose other updates moved them is healthy."""
    health = Health(last_healthy_step=6)
    health.check(7, {f"{part}/{SKIPPED}": 2.0, "actor/lr": 1e-6}, bounded())
    assert health.last_healthy_step == 6
    health.check(8, {f"{part}/{SKIPPED}": 1.0, f"{part}/grad_norm": 0.5}, bounded())
    assert health.last_healthy_step == 8


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
        ("scorer_errors", {"reward/failed_rate": 0.1, "reward/wrong_rate": 0.9}, False),
        ("scorer_errors", {"reward/failed_rate": 0.11}, True),
    ],
)
def test_a_bound_is_crossed_beyond_it(name, values, crossed):
    health = Health(last_healthy_step=6)
    found = health.check(7, values, bounded(**{name: 0.1}))
    assert list(found) == ([name] if crossed else [])
    assert health.last_healthy_step == (6 if crossed else 7)
    assert Health().check(7, values, bounded()) == {}


# check, metric, its values in order, the steps at which the bound is crossed, the bound, the window
TRENDS = [
    # windows of 3: 3.1 (the outlier is in it), 0.3, 0.6, 0.8, 0.9, 0.7, 0.5 -> drops of 2.8, 2.5,
    # 2.3, 2.2, 2.4, 2.6
    (
        "reward_drop",
        SCORE,
        [9.0, 0.0, 0.3, 0.6, 0.9, 0.9, 0.9, 0.3, 0.3],
        [4, 5, 6, 7, 8, 9],
        0.4,
        3,
    ),
    # windows of 3: .6, .8, .9, .7, .5, of which the third is the best
    ("reward_drop", SCORE, [0.3, 0.6, 0.9, 0.9, 0.9, 0.3, 0.3], [7], 0.3, 3),
    # over 4 steps: 0, .05, .067, .1, .1, .125, .1, .05
    ("scorer_errors", "reward/failed_rate", [0.0, 0.1, 0.1, 0.2, 0.0, 0.2, 0.0, 0.0], [6], 0.1, 4),
]


@pytest.mark.parametrize(("name", "metric", "values", "expected", "bound", "window"), TRENDS)
def test_a_trend_is_measured_over_steps_that_a_checkpoint_keeps(
    name, metric, values, expected, bound, window
):
    config = bounded(window, **{name: bound})
    health, steps = Health(), []
    for step, value in enumerate(values, start=1):
        if health.check(step, {metric: value}, config):
            steps.append(step)
        health = Health(**json.loads(json.dumps(dataclasses.asdict(health))))
    assert steps == expected
