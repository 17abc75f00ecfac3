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


@pytest.mark.parametrize("gen_batch_size", [4, 2])
def test_a_step_and_a_validation_are_one_call_each(trained, gen_batch_size):
    settings = ["trainer.val_before_train=True", "trainer.test_freq=2", "data.val_max_samples=3"]
    settings += [f"actor_rollout_ref.rollout.val_kwargs.{one}" for one in ("n=2", "do_sample=True", "temperature=1.0")]
    settings += [f"data.gen_batch_size={gen_batch_size}"]
    _, calls, lines, index_of = trained(*settings, steps=2)
    steps = [[index_of[ordinal] for ordinal in range(at, at + 4) for _ in range(2)] for at in (0, 4)]
    assert [len(call) for call in calls] == [6, 8, 8, 6]
    assert calls[1:3] == steps and calls[0] == calls[3] and calls[0][::2] == calls[0][1::2]
    assert lines[-1]["critic/score/max"] == 1.0  # one of two different answers


def test_groups_that_are_dropped_are_made_up_for_in_whole_rounds(trained):
    """The same calls and the same groups whatever finishes first; whole groups in the order of ordinals."""
    found = []
    for timing in (0, 1):
        filters = ["algorithm.filter_groups.enable=True", NO_BUFFER, "data.gen_batch_size=8"]
        run, calls, lines, index_of = trained(*filters, timing=timing, recipe="dapo", base=RayDAPOTrainer, steps=3)
        assert len(calls) > 3  # some groups are equal: a step has more than one round
        drawn = [line["collect/prompts_drawn"] for line in lines if "collect/prompts_drawn" in line]
        assert sum(map(len, calls)) == 2 * sum(drawn) and all(len(call) % 2 == 0 for call in calls)
        assert all(call[::2] == call[1::2] for call in calls)
        assert calls[0] == [index_of[ordinal] for ordinal in range(len(calls[0]) // 2) for _ in range(2)]
        found.append((calls, run.trained))
    assert found[0] == found[1]


def test_a_step_that_is_answered_ahead_is_one_call(trained):
    ahead = ["trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"]
    run, calls, _, index_of = trained(*ahead, steps=3)
    assert calls == [[index_of[o] for o in range(at, at + 4) for _ in range(2)] for at in (0, 4, 8)]
    assert [ordinals for ordinals, _ in run.trained] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_greedy_answers_of_a_baseline_have_a_call_of_their_own(trained):
    _, calls, _, index_of = trained("algorithm.adv_estimator=remax", steps=1)
    assert calls == [[index_of[o] for o in range(4) for _ in range(2)], [index_of[o] for o in range(4)]]


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
