"""Scoring in whole runs: runs without any score stop."""

from __future__ import annotations

import json

import pytest

from core.ray_trainer import RayPPOTrainer
from core.rewards.layer import RewardError
from recipes.dapo.dapo_ray_trainer import RayDAPOTrainer
from tests.core.scripted_run import configured, prepare, scripted

NO_BUFFER = "reward_model.overlong_buffer.enable=False"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("scored"))


@pytest.mark.parametrize("recipe", ["grpo", "dapo"])
def test_a_run_whose_every_answer_fails_stops_before_its_first_update(folder, recipe):
    """And a filter that drops failing groups does not draw for ever."""
    filters = [
        "algorithm.filter_groups.enable=True",
        NO_BUFFER,
        "algorithm.filter_groups.max_num_gen_batches=1000",
    ]
    given = filters if recipe == "dapo" else ["reward_model.on_error=mask"]
    config = configured(folder, recipe, *given, recipe=recipe, steps=3)
    trainer = RayDAPOTrainer if recipe == "dapo" else RayPPOTrainer
    run = scripted(trainer)(config, lambda request, _: "x").init_workers()
    with pytest.raises(RewardError, match="(?s)failed on each of .* answers.*ValueError: x"):
        run.fit()
    assert run.run.step == 0 and run.workers.version == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_whose_every_answer_fails_stops_the_run_after_steps_that_had_scores(
    folder, staleness
):
    """A server that went away would be a reward of 0 for ever; also where its answers were drawn a
    step ahead."""
    keys = [f"trainer.max_staleness={staleness}", "algorithm.rollout_correction.rollout_is=token"]
    config = configured(folder, f"away-{staleness}", *keys[: 2 * staleness], steps=9)
    run = scripted()(
        config, lambda request, version: "x" if version > 2 else str(request.seed % 5)
    ).init_workers()
    with pytest.raises(RewardError, match="(?s)failed on each of 8 answers.*ValueError: x"):
        run.fit()
    assert run.run.step == run.workers.version == 3 + staleness


def test_the_rate_counts_dropped_groups_and_stands_in_the_steps_line(folder, capsys):
    """A group of failures is dropped as one of equal scores: the rate of what was trained alone
    would be 0."""
    filters = ["algorithm.filter_groups.enable=True", NO_BUFFER, "trainer.logger=[console,jsonl]"]
    config = configured(folder, "dropped", *filters, recipe="dapo", steps=2)

    def respond(request, version):
        return "x" if sum(request.prompt_ids) % 2 else str(request.seed % 5)

    run = scripted(RayDAPOTrainer)(config, respond).init_workers()
    run.fit()
    lines = [
        json.loads(line) for line in (run.run.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(line["reward/crash_rate"] == 0.0 for line in lines) and any(
        line["reward/failed_rate"] for line in lines
    )
    assert "| scorer failed on " in capsys.readouterr().out
