"""A reward function of lists in whole runs: one call a step, whole groups in order, whatever the timing."""

from __future__ import annotations

import json
import random

import pytest

from core.rewards.layer import RewardError
from recipes.dapo.dapo_ray_trainer import RayDAPOTrainer
from tests.core.scripted_run import configured, prepare, scripted

NO_BUFFER = "reward_model.overlong_buffer.enable=False"
SEEN = """
import json, pathlib
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    with open({path!r}, "a") as file:
        file.write(json.dumps([e["index"] for e in extra_infos]) + "\\n")
    # the answers of a question are compared: the largest has 1
    best = {{}}
    for text, e in zip(solution_strs, extra_infos):
        best[e["index"]] = max(best.get(e["index"], ""), text)
    found = [float(text == best[e["index"]] != "0") for text, e in zip(solution_strs, extra_infos)]
    return found[{cut}:]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("batch"))


@pytest.fixture
def trained(folder, tmp_path):
    def train(*overrides, timing=0, recipe="grpo", base=None, cut=0, start=2, **settings):
        seen = tmp_path / f"seen-{timing}.jsonl"
        source = tmp_path / f"lists_{timing}.py"  # its own name: Python takes a cached file of equal size and second
        source.write_text(SEEN.format(path=str(seen), cut=cut))
        rng = random.Random(timing)
        batch = [f"custom_reward_function.path={source}", "reward_model.reward_manager=batch"]
        batch += ["reward_model.num_workers=2", "trainer.resume_mode=disable"]
        config = configured(folder, f"run-{timing}", *batch, *overrides, recipe=recipe, **settings)
        made = scripted(base) if base else scripted()
        run = made(config, lambda request, _: str(request.seed % 5), lambda *_: rng.random() * 50).init_workers()
        seen.unlink()  # calls at start
        run.fit()
        calls = [json.loads(line) for line in seen.read_text().splitlines()]
        lines = (run.run.run_dir / "metrics.jsonl").read_text().splitlines()
        index_of = [run.stream.prompt(ordinal).extra_info["index"] for ordinal in range(100)]
        return run, calls, [json.loads(line) for line in lines], index_of

    return train


def test_the_answers_to_a_prompt_are_one_call_in_training_and_validation(trained):
    settings = ["trainer.val_before_train=True", "data.val_max_samples=3"]
    settings += [f"actor_rollout_ref.rollout.val_kwargs.{one}" for one in ("n=2", "do_sample=True", "temperature=1.0")]
    _, calls, lines, index_of = trained(*settings, steps=2)
    assert len(calls) == 3 + 8 and all(len(call) == 2 == 1 + len(call) - len(set(call)) for call in calls)
    assert sorted(call[0] for call in calls[3:7]) == sorted(index_of[:4])
    assert lines[-1]["critic/score/max"] == 1.0  # one of two different answers


def test_a_greedy_answer_of_a_baseline_has_a_call_of_its_own(trained):
    _, calls, _, index_of = trained("algorithm.adv_estimator=remax", steps=1)
    assert sorted(map(len, calls)) == [1] * 4 + [2] * 4 and {call[0] for call in calls} == set(index_of[:4])


def test_too_few_results_never_train(trained):
    with pytest.raises(Exception, match="one result an answer: got . results for . answers"):
        trained(cut=1, steps=1)


def test_a_run_whose_every_answer_fails_stops_before_its_first_update(folder, caplog):
    config = configured(folder, "dead", "reward_model.on_error=mask", steps=3)
    run = scripted()(config, lambda request, _: "x").init_workers()
    with pytest.raises(RewardError, match="(?s)each of the 8 answers so far.*ValueError: x"):
        run.fit()
    assert run.run.step == 0 and run.workers.version == 0
    assert sum("Shown once" in record.getMessage() for record in caplog.records) == 1


def test_a_validation_whose_every_answer_fails_is_not_reported(folder):
    config = configured(folder, "dead-val", "trainer.val_only=True", steps=3)
    run = scripted()(config, lambda request, _: "x").init_workers()
    with pytest.raises(RewardError, match="each of the 1 answers"):
        run.fit()


def test_a_filter_that_drops_failing_groups_does_not_draw_for_ever(folder):
    filters = ["algorithm.filter_groups.enable=True", NO_BUFFER, "algorithm.filter_groups.max_num_gen_batches=1000"]
    config = configured(folder, "dead-dapo", *filters, recipe="dapo", steps=3)
    run = scripted(RayDAPOTrainer)(config, lambda request, _: "x").init_workers()
    with pytest.raises(RewardError, match="so far"):
        run.fit()


def test_the_rate_counts_dropped_groups_and_stands_in_the_steps_line(folder, capsys):
    """A group of failures is dropped as one of equal scores: the rate of what was trained alone would be 0."""
    filters = ["algorithm.filter_groups.enable=True", NO_BUFFER, "trainer.logger=[console,jsonl]"]
    config = configured(folder, "dropped", *filters, recipe="dapo", steps=2)

    def respond(request, version):
        return "x" if sum(request.prompt_ids) % 2 else str(request.seed % 5)

    run = scripted(RayDAPOTrainer)(config, respond).init_workers()
    run.fit()
    lines = [json.loads(line) for line in (run.run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(line["reward/crash_rate"] == 0.0 for line in lines) and any(line["reward/failed_rate"] for line in lines)
    assert "| scorer failed on " in capsys.readouterr().out
