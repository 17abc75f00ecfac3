"""DAPO: the equations at hand-made values, which groups are kept, what is masked, and the whole run
in small."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.algorithm.advantages import AdvantageInputs, grpo
from core.config.composition import compose, examine
from core.errors import InputError
from core.learner.batching import make_batch, mini_batches
from core.rollout.collect import Exhausted
from core.tracking.tracker import Tracker
from core.types import ScoredGroup, Stop
from recipes.dapo.dapo_ray_trainer import RayDAPOTrainer
from recipes.dapo.functions import overlong_punishment
from reward_scores.score import Score, ScoreStatus
from tests.faults.tiny_run import command, prepare
from tests.golden_dapo import group, trainer, trajectory

ROLLOUT = "actor_rollout_ref.rollout"
RIGHT, WRONG = Score(1.0), Score(-1.0, {"acc": 0.0})
FILTERING = "actor_rollout_ref.actor.overlong_filtering=True"
NO_BUFFER = "reward_model.overlong_buffer.enable=False"


# -- eq. 13 --


def test_the_overlong_punishment_is_equation_13(subtests):
    for length, penalty in [
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20480, -1.0),
        (9**9, -1.0),
    ]:
        with subtests.test(length=length, penalty=penalty):
            assert overlong_punishment(length, 20480, 4096) == penalty


def test_the_punishment_is_added_to_the_score_and_leaves_acc_alone(subtests):
    for length, value in [(16384, 1.0), (18432, 0.5), (20480, 0.0)]:
        with subtests.test(length=length, value=value):
            shaped = trainer().shape_reward(RIGHT, trajectory(length))
            assert (shaped.value, shaped.acc, shaped.parts["overlong"]) == (value, 1.0, value - 1.0)
            assert not shaped.masked
            threefold = trainer("reward_model.overlong_buffer.penalty_factor=3.0").shape_reward(
                WRONG, trajectory(length)
            )
            assert threefold.value == -1.0 + 3 * (value - 1.0) and threefold.acc == 0.0


def test_the_prompt_is_no_part_of_the_length():
    """Neither the penalty nor the mask counts its tokens, and an answer that ends at the limit was
    not cut off."""
    both, long = trainer(FILTERING), dataclasses.replace(trajectory(16384), prompt_ids=[1] * 20480)
    shaped = both.shape_reward(RIGHT, long)
    assert shaped.parts["overlong"] == 0 and shaped.value == 1.0 and not shaped.masked
    assert not both.shape_reward(RIGHT, trajectory(20480)).masked
    assert both.shape_reward(RIGHT, trajectory(20480, stop=Stop.LENGTH)).masked


# -- dynamic sampling --


def test_a_group_is_kept_if_some_answers_are_right_and_some_wrong(subtests):
    for right, kept in [(0, False), (1, True), (8, True), (15, True), (16, False)]:
        with subtests.test(right=right, kept=kept):
            assert trainer().keep_group(group([RIGHT] * right + [WRONG] * (16 - right))) is kept


def shaped_group(*lengths: int, score: Score = RIGHT) -> ScoredGroup:
    return group([trainer().shape_reward(score, trajectory(length)) for length in lengths])


def test_an_all_right_group_with_a_length_penalty():
    lengthy = shaped_group(100, 100, 18432)
    assert not trainer().keep_group(lengthy)
    assert trainer("algorithm.filter_groups.metric=seq_reward").keep_group(lengthy)
    assert trainer("algorithm.filter_groups.metric=overlong").keep_group(lengthy)
    # The scorer's own
    with_score = [dataclasses.replace(s, parts={**s.parts, "score": 1.0}) for s in lengthy.scores]
    assert not trainer("algorithm.filter_groups.metric=score").keep_group(group(with_score))
    for metric, warned in (("seq_reward", 1), ("seq_final_reward", 1), ("acc", 0), ("score", 0)):
        composed = examine("dapo", [f"algorithm.filter_groups.metric={metric}"])
        assert len(composed.warnings) == warned and not composed.problems


def test_an_answer_that_was_not_graded_decides_nothing():
    lost = Score(0.0, {"acc": 0.0}, ScoreStatus.TIMEOUT, masked=True)
    assert not trainer().keep_group(group([RIGHT, RIGHT, lost]))
    assert not trainer().keep_group(group([lost, lost]))
    assert trainer().keep_group(group([RIGHT, WRONG, lost]))
    # By overlong filtering: graded, so it is evidence
    cut_off = dataclasses.replace(WRONG, masked=True)
    assert trainer().keep_group(group([RIGHT, RIGHT, cut_off]))
    counted = dataclasses.replace(lost, masked=False)  # on_error=zero: it is a zero like others
    assert trainer().keep_group(group([RIGHT, RIGHT, counted]))
    assert trainer("algorithm.filter_groups.metric=format").keep_group(
        group([counted, Score(1.0, {"format": 1.0})])
    )


def test_bad_input_is_refused(subtests):
    for overrides, says in [
        ([f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n=1: "),
        (
            [f"{ROLLOUT}.n=1", "algorithm.adv_estimator=reinforce_plus_plus"],
            "one answer equals itself",
        ),
        (
            ["data.max_response_length=4095"],
            "reward_model.overlong_buffer.len=4096: must be between 1 and",
        ),
        (
            ["algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=True"],
            "KL penalty",
        ),
        (
            ["data.gen_batch_size=64", "algorithm.filter_groups.max_num_gen_batches=2"],
            "algorithm.filter_groups.max_num_gen_batches=2: ",
        ),
    ]:
        with subtests.test(overrides=overrides, says=says), pytest.raises(InputError, match=says):
            compose("dapo", overrides)


def test_what_published_scripts_set_is_no_problem(subtests):
    for overrides in (
        ["algorithm.filter_groups.max_num_gen_batches=0"],
        ["reward_model.overlong_buffer.penalty_factor=0"],
    ):
        with subtests.test(overrides=overrides):
            composed = examine("dapo", overrides)
            assert composed.problems == ()
            assert any(line.startswith(overrides[0]) for line in composed.warnings)
    unlimited = trainer("algorithm.filter_groups.max_num_gen_batches=0")
    assert unlimited.collect_limits().max_drawn == 10 * unlimited.config.data.gen_batch_size
    assert examine("dapo", ["data.gen_batch_size=512"]).problems == ()


# -- overlong filtering --


def test_a_truncated_answer_carries_no_loss_and_keeps_its_reward_in_the_group():
    """Three answers of 2, 4 and 3 tokens with rewards 1, -1, 1; the second ran into the limit."""
    dapo, answers = (
        trainer(NO_BUFFER, FILTERING),
        [trajectory(2), trajectory(4, stop=Stop.LENGTH), trajectory(3)],
    )
    scores = [dapo.shape_reward(s, t) for s, t in zip((RIGHT, WRONG, RIGHT), answers, strict=True)]
    assert [s.masked for s in scores] == [False, True, False] and [s.value for s in scores] == [
        1.0,
        -1.0,
        1.0,
    ]
    batch = make_batch([ScoredGroup(group(scores).prompt, tuple(answers), tuple(scores))], pad_id=0)
    fields = {"in_group_stats": batch.in_group_stats, "epsilon": 0}
    advantages, _ = grpo(
        AdvantageInputs(batch.reward, batch.lengths, batch.response_mask, batch.group, **fields)
    )
    # mean 1/3, standard deviation 2 / sqrt(3): (1 - 1/3) / that is 1 / sqrt(3); without the second
    # it would be 0
    first_and_last = batch.adding(advantages=advantages).rows([0, 2])
    assert torch.allclose(
        first_and_last.advantages[first_and_last.response_mask], torch.tensor(3**-0.5)
    )
    for mode, weights in (
        ("token-mean", (2 / 5, 0, 3 / 5)),
        ("seq-mean-token-mean", (1 / 2, 0, 1 / 2)),
    ):
        (step,) = mini_batches(
            batch.adding(advantages=advantages), prompts=1, agg_mode=mode, scale_factor=1.0
        )
        assert torch.allclose(step.padded("loss_weight").sum(1), torch.tensor(weights)), mode
    unfiltered = [trainer(NO_BUFFER).shape_reward(WRONG, t).masked for t in answers]
    assert unfiltered == [False, False, False]


# -- the recipe's folder --


OFF = (
    *("algorithm.filter_groups.enable=False", "algorithm.filter_groups.metric=acc", NO_BUFFER),
    *("reward_model.overlong_buffer.len=4096", "actor_rollout_ref.actor.overlong_filtering=False"),
)


def test_techniques_that_are_off_are_accepted_by_other_recipes():
    composed = examine("grpo", OFF)
    assert not composed.problems and composed.config == compose("grpo")
    assert composed.unused.keys() == {text.partition("=")[0] for text in OFF}


def test_techniques_that_are_on_are_refused_with_the_recipe_that_has_them():
    techniques = [
        "algorithm.filter_groups.enable=True",
        FILTERING,
        "data.overlong_buffer={enable: True, len: 4}",
    ]
    for recipe in ("ppo", "grpo", "search_r1"):
        problems = examine(recipe, ["data.train_batch_size=256", *techniques]).problems
        switches = (
            "algorithm.filter_groups.enable",
            FILTERING.partition("=")[0],
            "reward_model.overlong_buffer.enable",
        )
        assert [line.partition("=")[0] for line in problems] == [*switches]
        assert all(line.endswith("; run python -m recipes.dapo.main_dapo") for line in problems)


# -- the whole run --

# Right by the letters that were drawn: about half of the answers, and of groups of two about half
# are mixed
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 2)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare(folder)
    (folder / "reward.py").write_text(REWARD)
    return folder


def tiny(files: Path, run: Path, steps: int, *overrides: str) -> RayDAPOTrainer:
    """A trainer that is ready to fit, with a dump of what it trains on."""
    common = [
        *(
            f"{ROLLOUT}.n=2",
            "reward_model.overlong_buffer.len=2",
            f"trainer.rollout_data_dir={run}-rollouts",
        ),
        *("data.gen_batch_size=6", "trainer.test_freq=-1", "trainer.val_before_train=False"),
    ]
    arguments = command(files, "dapo", steps, *common, *overrides)(run)[3:]
    return RayDAPOTrainer(compose("dapo", arguments)).init_workers()


def test_with_the_prompts_exhausted_the_run_ends_or_trains_on_what_there_is_and_says_why(
    files, tmp_path, monkeypatch
):
    """13 prompts, one pass, 4 groups a step of which about half are dropped: the last draws go into
    the next pass."""
    unlimited = (
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
        "trainer.save_freq=-1",
    )
    run, kept = tiny(files, tmp_path / "epoch", 1, *unlimited, "trainer.test_freq=9"), []
    monkeypatch.setattr(
        Tracker, "log_samples", lambda self, step, rows, last: kept.append((step, last))
    )
    run.fit()
    # The one validation is the last, of which more samples are kept
    assert kept == [(run.run.step, True)]
    last = json.loads((tmp_path / "epoch" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (
        run.run.finished()
        and last["collect/next_ordinal"] >= 13
        and run.run.step <= run.run.total_steps == 3
    )
    scarce = ("algorithm.filter_groups.max_num_gen_batches=1", "trainer.save_freq=-1")
    alike = ("actor_rollout_ref.rollout.temperature=0.01",)  # every answer to a prompt is the same
    few = tiny(
        files, tmp_path / "few", 1, *scarce, *alike, "algorithm.filter_groups.on_exhausted=raise"
    )
    with pytest.raises(
        Exhausted,
        match=r"of the 4 groups .* after 6 prompts \(\d dropped\): "
        r".*max_num_gen_batches",
    ):
        few.fit()


def rollouts(run: Path) -> list[tuple[int, dict[int, list[float]]]]:
    """Step -> ordinal -> verdicts, in the order of training."""
    steps = []
    for path in sorted(Path(f"{run}-rollouts").glob("*.jsonl"), key=lambda p: int(p.stem)):
        groups: dict[int, list[float]] = {}
        for row in map(json.loads, path.read_text().splitlines()):
            groups.setdefault(row["ordinal"], []).append(row["acc"])
        steps.append((int(path.stem), groups))
    return steps


def test_the_trained_ordinals_are_the_lowest_that_pass(files, tmp_path):
    """With a policy that stands still, what every prompt's group would be is known from a run that
    keeps all."""
    still = ("actor_rollout_ref.actor.optim.lr=0", "trainer.save_freq=-1")
    tiny(files, tmp_path / "all", 9, *still, "algorithm.filter_groups.enable=False").fit()
    verdicts = {
        ordinal: accs
        for _, groups in rollouts(tmp_path / "all")
        for ordinal, accs in groups.items()
    }
    assert sorted(verdicts) == list(range(36))
    mixed = [ordinal for ordinal, accs in sorted(verdicts.items()) if len(set(accs)) > 1]
    assert 12 <= len(mixed) <= 30, "neither all nor few of them are mixed"
    tiny(files, tmp_path / "dapo", 3, *still).fit()
    trained = rollouts(tmp_path / "dapo")
    assert [list(groups) for _, groups in trained] == [mixed[0:4], mixed[4:8], mixed[8:12]]
    assert all(
        accs == verdicts[ordinal] for _, groups in trained for ordinal, accs in groups.items()
    )
    lines = [
        json.loads(line) for line in (tmp_path / "dapo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(
        line["reward/zero_variance_share"] == 0 and line["reward/overlong/mean"] <= 0
        for line in lines
    )
    assert sum(line["collect/prompts_dropped"] for line in lines) == mixed[11] + 1 - 12


def test_a_resumed_run_goes_on_with_the_ordinals_it_would_have_had(files, tmp_path, caplog):
    tiny(files, tmp_path / "whole", 4).fit()
    tiny(files, tmp_path / "parts", 2).fit()
    with caplog.at_level(logging.INFO, logger="core"):
        tiny(files, tmp_path / "parts", 4).fit()
    assert "resumed after step 2" in caplog.text
    whole, parts = rollouts(tmp_path / "whole"), rollouts(tmp_path / "parts")
    assert [step for step, _ in parts] == [1, 2, 3, 4] and parts == whole
    ordinals = [ordinal for _, groups in parts for ordinal in groups]
    assert ordinals == sorted(set(ordinals)) and ordinals != list(range(16)), (
        "each once, and some were dropped"
    )
    ends = [
        load_file(tmp_path / name / "global_step_4/actor/model.safetensors")
        for name in ("whole", "parts")
    ]
    start = load_file(files / "model" / "model.safetensors")
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert any(
        not torch.equal(ends[0][name].float(), start[name]) for name in start if name in ends[0]
    )


def test_validation_neither_shapes_nor_filters(files, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("validation called a hook of training")

    validated = tiny(files, tmp_path / "run", 1, "data.max_response_length=3", FILTERING)
    monkeypatch.setattr(validated, "keep_group", refuse)
    monkeypatch.setattr(validated, "shape_reward", refuse)
    groups = asyncio.run(validated.answer_val_prompts())
    validated.workers.close()
    assert len(groups) == 4 and not any(
        s.masked or "overlong" in s.parts for g in groups for s in g.scores
    )
    assert any(t.truncated for g in groups for t in g.trajectories), (
        "filtering would have had something to mask"
    )
