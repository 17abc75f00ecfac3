"""The scripts on slices of the real data, on files as they are published, and on a stand-in for the
hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_preprocess import aime, dapo_math, gsm8k, math_dataset
from data_preprocess.cli import read_local, run

SLICES = Path(__file__).parents[1] / "data"
ROOT = SLICES.parents[1]


@pytest.fixture
def local(tmp_path):
    """Folders that look like the downloaded data sets."""
    for name, files in {
        "gsm8k": {"gsm8k_train.jsonl": "train.jsonl", "gsm8k_test.jsonl": "test.jsonl"},
        "math": {
            "math_test.jsonl": "test.jsonl",
            "math_train_answers_only.json": "train_answers_only.json",
        },
    }.items():
        (tmp_path / name).mkdir()
        for source, target in files.items():
            shutil.copy(SLICES / source, tmp_path / name / target)
    return tmp_path


def read(path):
    return pq.read_table(path).to_pylist()


def test_all_files_of_a_split_are_read(tmp_path):
    names = [f"train-{number:05d}-of-00002.parquet" for number in range(2)]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for number, name in enumerate(names):
        row = {"question": f"q{number}", "answer": f"#### {number}"}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "hub" / "data" / name)
    by_name = [str(tmp_path / "hub" / "data" / name) for name in names]
    for given in ([str(tmp_path / "hub")], by_name):
        splits = read_local(given)
        assert [row["question"] for row in splits["train"]] == ["q0", "q1"]


def test_gsm8k_rows_are_verl_s(local, capsys):
    out = local / "out"
    assert (
        run(gsm8k.SOURCE, ["--local_dir", str(out), "--local_dataset_path", str(local / "gsm8k")])
        == 0
    )
    train, test = read(out / "train.parquet"), read(out / "test.parquet")
    question = json.loads((SLICES / "gsm8k_train.jsonl").read_text().split("\n")[0])
    suffix = ' Let\'s think step by step and output the final answer after "####".'
    assert train[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question["question"] + suffix}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": question["answer"],
            "question": question["question"],
        },
    }
    assert [row["reward_model"]["ground_truth"] for row in train] == [
        "72",
        "10",
        "5",
        "42",
        "624",
        "35",
        "1080",
        "-7",
    ]
    assert [row["extra_info"]["split"] for row in test] == ["test"] * 4
    assert f"{out / 'train.parquet'}: 8 rows, sha256 " in capsys.readouterr().out


def test_math_rows_are_verl_s_with_level_and_subject(local, capsys):
    out = local / "out"
    assert (
        run(
            math_dataset.SOURCE,
            ["--local_save_dir", str(out), "--local_dataset_path", str(local / "math")],
        )
        == 0
    )
    train, test = read(out / "train.parquet"), read(out / "test.parquet")
    raw = json.loads((SLICES / "math_test.jsonl").read_text().split("\n")[0])
    content = raw["problem"] + (
        " Let's think step by step and output the final answer within \\boxed{}."
    )
    assert test[0]["prompt"] == [{"role": "user", "content": content}]
    assert test[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    named = {"split": "test", "index": 0, "level": "Level 3", "subject": "Algebra"}
    assert test[0]["extra_info"] == {**named, "answer": raw["solution"], "question": raw["problem"]}
    golds = [row["reward_model"]["ground_truth"] for row in test]
    assert golds == ["2", "10", r"\dfrac{9}{7}", "i", "4", r"\text{Evelyn}", "10"]
    assert [row["extra_info"]["answer"] for row in train] == [None] * 3
    assert "1 of 4 left out, no gold answer: 3\n" in capsys.readouterr().out


@pytest.fixture
def hub(monkeypatch):
    """Return a function that puts a stand-in in the place of ``datasets``, and the questions to the
    hub."""
    asked = []

    def answer(found) -> list:
        def load_dataset(*args):
            asked.append(args)
            if isinstance(found, Exception):
                raise found
            return found

        fake = SimpleNamespace(
            load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=KeyError)
        )
        monkeypatch.setitem(sys.modules, "datasets", fake)
        return asked

    return answer


def test_the_hub_is_asked_for_the_right_configuration(tmp_path, hub):
    asked = hub({"train": [{"question": "1+1?", "answer": "#### 2"}], "validation": []})
    assert run(gsm8k.SOURCE, ["--local_dir", str(tmp_path)]) == 0
    assert run(gsm8k.SOURCE, ["--local_dir", str(tmp_path), "--hub", "me/gsm8k"]) == 0
    assert asked == [("openai/gsm8k", "main"), ("me/gsm8k", "main")]
    assert read(tmp_path / "train.parquet")[0]["reward_model"]["ground_truth"] == "2"


def test_a_hub_that_cannot_be_reached_says_what_to_do(tmp_path, hub, capsys):
    hub(ConnectionError("no route to host"))
    assert run(math_dataset.SOURCE, ["--local_dir", str(tmp_path)]) == 2
    assert (
        "no route to host" in (error := capsys.readouterr().err) and "--local_dataset_path" in error
    )


def test_bad_arguments_end_with_2_and_a_line(tmp_path, capsys, subtests):
    for arguments, message in [
        (["--hdfs_dir", "/x"], "--hdfs_dir is not supported"),
        (["--local_dataset_path", "/does/not/exist"], "/does/not/exist does not exist"),
        (["--local_dataset_path", "{tmp}"], "holds none of train.jsonl"),
        (["--local_dataset_path", "{tmp}/other.jsonl"], "is not named train* or test*"),
        (["--local_dataset_path", "{tmp}/train_broken.jsonl"], "not readable as jsonl"),
        (["--local_dataset_path", "{tmp}/train_object.json"], "it holds a dict"),
    ]:
        with subtests.test(arguments=arguments, message=message):
            (tmp_path / "other.jsonl").write_text("{}\n")
            (tmp_path / "train_broken.jsonl").write_text('{"question": \n')
            (tmp_path / "train_object.json").write_text('{"data": []}')
            try:
                code = run(gsm8k.SOURCE, [argument.format(tmp=tmp_path) for argument in arguments])
            except SystemExit as stop:
                code = stop.code
            assert code == 2 and message in capsys.readouterr().err


def test_the_command_runs_and_expands_the_home_folder(local):
    command = [sys.executable, "-m", "data_preprocess.gsm8k", "--local_dir", "~/made"]
    command += ["--local_dataset_path", "~/gsm8k"]
    subprocess.run(
        command, check=True, cwd=ROOT, env={**os.environ, "HOME": str(local)}, capture_output=True
    )
    assert sorted(os.listdir(local / "made")) == ["test.parquet", "train.parquet"]


# -- DAPO's training prompts and AIME: one split, copies removed --

PUBLISHED = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to "
    "put your answer on its "
    'own line after "Answer:".'
)


def published_example(question, answer, index):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": PUBLISHED.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_dapo_keeps_each_prompt_once_with_the_exact_text(tmp_path, capsys):
    examples = [
        published_example(q, a, i)
        for q, a, i in (("1+1?", "2", "x"), ("2+2?", "4", "y"), ("1+1?", "2", "z"))
    ]
    examples += [
        published_example("2+2?", "5", "w"),
        published_example("3+3?", "6", "v"),
        examples[0],
    ] * 3
    pq.write_table(
        pa.Table.from_pylist(examples), tmp_path / "dapo-math-17k.parquet", row_group_size=5
    )
    source = str(tmp_path / "dapo-math-17k.parquet")
    assert (
        run(
            dapo_math.SOURCE, ["--local_dir", str(tmp_path / "out"), "--local_dataset_path", source]
        )
        == 0
    )
    rows = read(tmp_path / "out" / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "4", "6"]
    assert dapo_math.gold({"problem": "1+1?", "answer": None}) == ""
    assert rows[1] == {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": PUBLISHED.format("2+2?")}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 1, "question": "2+2?", "source_id": "y"},
    }
    printed = capsys.readouterr().out
    assert (
        "9 of 12 left out, the same question as an earlier one\n  3 of these have another answer"
    ) in printed
    assert "no test split" not in printed and os.listdir(tmp_path / "out") == ["train.parquet"]


def test_every_split_of_the_hub_is_read_where_there_is_only_one(tmp_path, hub):
    asked = hub(
        {
            "train": [published_example("q", "073", 0)] * 32,
            "extra": [published_example("p", "000", 1)] * 32,
        }
    )
    assert run(aime.SOURCE, ["--local_dir", str(tmp_path)]) == 0
    rows = read(tmp_path / "test.parquet")
    found = [(row["data_source"], row["reward_model"]["ground_truth"]) for row in rows]
    assert found == [("aime2024", "73"), ("aime2024", "0")] and asked == [
        ("BytedTsinghua-SIA/AIME-2024",)
    ]
