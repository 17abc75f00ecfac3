"""Search-R1's rows: the published prompts to the letter, all answers, every question, every form of
file."""

import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.data.parquet import ExampleFile
from core.errors import Problems
from data_preprocess import nq_hotpotqa, qa_test_sets
from data_preprocess.open_qa import answers_of
from data_preprocess.search_r1_prompts import R1_PROMPT, SEARCH_PROMPT

FORMS = {  # what the sets look like where they are published
    "nq": {"question": "who wrote hamlet", "answer": ["Shakespeare", "W. Shakespeare"]},
    "triviaqa": {
        "id": "t1",
        "question": "Who wrote Hamlet? ",
        "golden_answers": ["Shakespeare", "Shakespeare"],
    },
    "popqa": {
        "id": 7,
        "question": "Who wrote Hamlet?",
        "possible_answers": '["Shakespeare", "Bard"]',
    },
    "hotpotqa": {"question": "Who wrote Hamlet?", "answer": "Shakespeare", "type": "bridge"},
    "2wikimultihopqa": {
        "question": "Who wrote Hamlet?",
        "answers": ["Shakespeare"],
        "metadata": {"a": 1},
    },
    "musique": {
        "question": "Who wrote Hamlet?",
        "answer": "Shakespeare",
        "answer_aliases": ["Bard"],
    },
    "bamboogle": {"question": "Who wrote Hamlet?", "answer": "Shakespeare"},
}


def read(path):
    return pq.read_table(path).to_pylist()


@pytest.fixture
def folder(tmp_path):
    """FlashRAG's layout: test or dev, and train."""
    for name, example in FORMS.items():
        (tmp_path / "local" / name).mkdir(parents=True)
        split = "dev" if name in ("hotpotqa", "2wikimultihopqa", "musique") else "test"
        for file in (split, "train"):
            lines = [
                json.dumps(example | {"question": f"{example['question']} {file}"}),
                json.dumps(example),
            ]
            (tmp_path / "local" / name / f"{file}.jsonl").write_text("\n".join(lines))
    return tmp_path / "local"


def test_the_seven_test_sets_are_rows_of_the_published_form(folder, tmp_path, capsys):
    assert (
        qa_test_sets.main(
            ["--local_dir", str(tmp_path / "out"), "--local_dataset_path", str(folder)]
        )
        == 0
    )
    rows = {name: read(tmp_path / "out" / f"{name}.parquet") for name in FORMS}
    assert rows["nq"][1] == {
        "data_source": "nq",
        "prompt": [
            {"role": "user", "content": SEARCH_PROMPT.replace("{question}", "who wrote hamlet?")}
        ],
        "ability": "fact-reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": ["Shakespeare", "W. Shakespeare"]},
        },
        "extra_info": {"split": "test", "index": 1, "question": "who wrote hamlet?"},
    }
    targets = {
        name: found[1]["reward_model"]["ground_truth"]["target"] for name, found in rows.items()
    }
    bard = {"popqa", "musique"}
    assert targets == {
        name: ["Shakespeare", "W. Shakespeare"]
        if name == "nq"
        else ["Shakespeare"] + ["Bard"] * (name in bard)
        for name in FORMS
    }
    splits = {name: found[0]["extra_info"]["split"] for name, found in rows.items()}
    assert splits["triviaqa"] == "test" and splits["hotpotqa"] == splits["musique"] == "dev"
    assert "note: the published set has 3610 questions, this one 2" in capsys.readouterr().out


def test_the_prompts_are_the_published_ones():
    digests = [
        hashlib.sha256(text.encode()).hexdigest()[:16] for text in (SEARCH_PROMPT, R1_PROMPT)
    ]
    assert digests == ["325187b4e28848fc", "e0b4172b1340330a"]  # of the published texts


def test_the_training_mix_holds_both_sets_and_the_baseline_s_prompt(folder, tmp_path, capsys):
    given = [
        "--local_dir",
        str(tmp_path / "out"),
        "--local_dataset_path",
        str(folder),
        "--prompt",
        "r1",
    ]
    assert nq_hotpotqa.main(given) == 0
    rows = read(tmp_path / "out" / "train.parquet")
    assert [row["data_source"] for row in rows] == ["nq", "nq", "hotpotqa", "hotpotqa"]
    assert rows[3]["prompt"][0]["content"] == R1_PROMPT.replace("{question}", "Who wrote Hamlet?")
    names = {
        row.name for row in ExampleFile(tmp_path / "out" / "train.parquet").examples(Problems())
    }
    assert len(names) == 4  # no two questions of the mix share a name


def test_files_by_name_in_other_forms(tmp_path, folder):
    (tmp_path / "topics.txt").write_bytes(
        b'who wrote hamlet\t[\'Shakespeare\', "S\'s"]\r\n"a ""b"""\t[\'c\']\r\n'
    )
    (tmp_path / "nq.dev.jsonl.gz").write_bytes(
        gzip.compress((folder / "nq" / "test.jsonl").read_bytes())
    )
    pq.write_table(pa.Table.from_pylist([FORMS["bamboogle"]]), tmp_path / "b.parquet")
    (tmp_path / "h.json").write_text(json.dumps([FORMS["hotpotqa"]]))
    files = {
        "triviaqa": "topics.txt",
        "nq": "nq.dev.jsonl.gz",
        "bamboogle": "b.parquet",
        "hotpotqa": "h.json",
    }
    given = [f"{name}={tmp_path / file}" for name, file in files.items()]
    command = ["--local_dir", str(tmp_path / "out"), "--sets", *files, "--local_dataset_path"]
    assert qa_test_sets.main([*command, *given]) == 0
    assert [len(read(tmp_path / "out" / f"{name}.parquet")) for name in files] == [2, 2, 1, 1]
    trivia = read(tmp_path / "out" / "triviaqa.parquet")
    assert trivia[0]["reward_model"]["ground_truth"]["target"] == ["Shakespeare", "S's"]
    assert trivia[1]["extra_info"]["question"] == 'a "b"?'
    assert read(tmp_path / "out" / "nq.parquet")[0]["extra_info"]["split"] == "dev"


def test_a_row_that_cannot_be_evaluated_is_an_error_and_not_left_out(tmp_path, capsys, subtests):
    given = [
        "--local_dir",
        str(tmp_path),
        "--sets",
        "bamboogle",
        "--local_dataset_path",
        f"bamboogle={tmp_path}/b.jsonl",
    ]
    for missing in ["question", "answer"]:
        with subtests.test(missing=missing):
            (tmp_path / "b.jsonl").write_text(json.dumps(FORMS["bamboogle"] | {missing: " "}))
            assert qa_test_sets.main(given) == 2
            assert f"bamboogle: example 0 of test has no {missing}" in capsys.readouterr().err
            assert not (tmp_path / "bamboogle.parquet").exists()


def test_what_is_missing_or_broken_is_said(tmp_path, folder, capsys):
    (folder / "nq" / "test.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": ')
    given = [
        "--local_dir",
        str(tmp_path / "out"),
        "--local_dataset_path",
        str(folder),
        "--sets",
        "nq",
    ]
    assert qa_test_sets.main(given) == 2
    assert "test.jsonl line 2: not JSON" in capsys.readouterr().err
    (folder / "popqa" / "test.jsonl").unlink()
    (folder / "popqa" / "train.jsonl").unlink()
    assert qa_test_sets.main([*given[:-1], "popqa"]) == 2
    assert (
        "hold no popqa/test.jsonl or popqa/dev.jsonl or popqa/train.jsonl"
        in capsys.readouterr().err
    )
    assert qa_test_sets.main([*given[:3], "nq=/no/such/file", "--sets", "nq"]) == 2
    assert "/no/such/file: there is no such file" in capsys.readouterr().err


def test_answers_that_stand_in_a_mapping_are_its_values():
    squad = {"answers": {"text": ["Paris"], "answer_start": [3]}}
    trivia = {"answer": {"value": "Paris", "aliases": ["City of Light"]}}
    assert answers_of(squad) == ["Paris"]
    assert answers_of(trivia) == ["Paris", "City of Light"]
    assert answers_of({"answer": {"other": "Paris"}}) == []
    assert answers_of({"golden_answers": ["Paris", None], "answer": None}) == ["Paris"]
    assert answers_of({"answer": 5}) == ["5"]
