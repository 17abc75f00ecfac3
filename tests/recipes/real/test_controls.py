"""Controls: the coin is fair and does not know the task, shuffled ground truths are all others',
scripts reach both."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import InputError
from recipes.real import arithmetic, report
from recipes.real.controls import CONTROLS, control_of, random_rows, shuffled_rows
from recipes.real.report import AnsweredModel
from results.reporting.run_scripts import read_script
from reward_scores import scorer_for

ROOT = Path(__file__).resolve().parents[3]
ROWS = arithmetic.rows_of()["train"][:400]


def test_the_coin_is_fair_repeats_and_depends_on_answer_and_prompt():
    lines = list(random_rows(ROWS))
    scorer = scorer_for(lines[0]["data_source"])

    def coins(answer):
        return [
            scorer(answer, line["reward_model"]["ground_truth"], line["extra_info"]).value
            for line in lines
        ]

    assert coins("59") == coins("59") != coins("60")
    assert 0.4 < sum(coins("59")) / len(lines) < 0.6  # one answer does not win everywhere
    one = [scorer(str(at), None, {"seed": 1}).value for at in range(1000)]
    assert 0.45 < sum(one) / 1000 < 0.55 and set(one) == {0.0, 1.0}
    right = [
        scorer(line["reward_model"]["ground_truth"]["target"][0], "", line["extra_info"]).value
        for line in lines
    ]
    assert 0.4 < sum(right) / len(lines) < 0.6


def test_shuffled_rows_hold_the_same_ground_truths_and_none_its_own():
    lines = list(shuffled_rows(ROWS))
    before = [line["reward_model"]["ground_truth"]["target"] for line in ROWS]
    after = [line["reward_model"]["ground_truth"]["target"] for line in lines]
    assert sorted(before) == sorted(after) and all(
        one != other for one, other in zip(before, after, strict=True)
    )
    assert [line["prompt"] for line in lines] == [line["prompt"] for line in ROWS]
    assert {line["data_source"] for line in lines} == {arithmetic.DATA_SOURCE}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(
    ("recipe", "words", "task"),
    [
        ("grpo", (), "instructions"),
        ("grpo", ("passages",), "passages"),
        ("search_r1", (), "search"),
    ],
)
def test_a_word_of_the_script_chooses_the_control(recipe, words, task, control):
    path = ROOT / "recipes" / recipe / "run_smollm2_135m.sh"
    plain, controlled = read_script(path, words).config, read_script(path, (*words, control)).config
    assert controlled.data.train_files == (f"./outputs/real/{task}/train_{control}.parquet",)
    assert (
        controlled.data.val_files
        == plain.data.val_files
        == (f"./outputs/real/{task}/test.parquet",)
    )
    names = plain.trainer.experiment_name, controlled.trainer.experiment_name
    assert names[1] == names[0].replace("-seed1", f"_{control}-seed1")
    assert (
        control_of(controlled.data.train_files) == CONTROLS[control]
        and control_of(plain.data.train_files) is None
    )


def test_scores_that_are_called_guarded_and_were_made_by_another_reward_are_refused(
    tmp_path, monkeypatch
):
    for name in ("naive.jsonl", "naive.scores-guarded.jsonl"):
        (tmp_path / name).write_text('{"uid": "a", "acc": [1.0]}\n')
    given = {"rewards": {"reward_model.reward_kwargs": {"instructions": {"method": "naive"}}}}
    monkeypatch.setattr(report, "read_manifest", lambda *_: given)
    with pytest.raises(
        InputError,
        match=r"naive\.scores-guarded\.jsonl: is called guarded .*method=naive; score "
        r".*again",
    ):
        AnsweredModel.load(tmp_path / "naive.jsonl")
