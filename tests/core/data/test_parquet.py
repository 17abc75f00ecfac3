import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.data.parquet import ExampleFile
from core.errors import InputError, Problems
from tests.row_files import plain_row, rows_file, write_parquet

CHAT = [{"role": "user", "content": "hi"}]


def problems_of(path, *rows):
    problems = Problems()
    good = list(ExampleFile(write_parquet(path, rows)).examples(problems))
    return good, problems.lines()


def test_a_row_comes_back_as_it_was_written(tmp_path):
    chat = [
        {"role": "system", "content": ""},
        *CHAT,
        {"role": "assistant", "content": "what?", "name": "bot"},
    ]
    gold = {"target": ["Paris", "paris"]}
    raw = plain_row(
        4, "qa", prompt=chat, ability="qa", reward_model={"style": "rule", "ground_truth": gold}
    )
    rows = [plain_row(0, prompt=CHAT, reward_model=raw["reward_model"]), raw]
    row = ExampleFile(write_parquet(tmp_path / "a.parquet", rows)).example(1)
    # The fields that only another message has are not there as None
    assert row.prompt == tuple(chat)
    assert row.ground_truth == gold
    assert row.data_source == "qa" and row.number == 1 and row.where.endswith("a.parquet row 1")
    assert row.extra_info == {"split": "train", "index": 4}


def test_other_column_names(tmp_path):
    raw = {"text": "q", "source": "s", "reward_model": {"style": "rule", "ground_truth": 3}}
    path = write_parquet(tmp_path / "a.parquet", [raw])
    one = ExampleFile(path, prompt_key="text", reward_fn_key="source").example(0)
    assert (one.prompt, one.data_source, one.ground_truth, one.extra_info, one.name) == (
        "q",
        "s",
        3,
        {},
        None,
    )


def test_json_lines_are_examples_too(tmp_path):
    rows = [plain_row(0, prompt=CHAT), plain_row(1, prompt=CHAT)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = ExampleFile(write_parquet(tmp_path / "a.parquet", rows))
    lines = ExampleFile(tmp_path / "a.jsonl")
    assert [lines.example(n).content_hash for n in (0, 1)] == [
        written.example(n).content_hash for n in (0, 1)
    ]


def lines_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ExampleFile(path)


@pytest.mark.parametrize(
    "golds",
    [
        ["2020-01-05", "1999-12-31 10:00:00"],
        [34, 0.5],
        [12345678901234567890, 9007199254740993, 0.5],
        ["5", 5, ["5", "five"], {"a": 1}, True],
        [{"a": 1}, {"b": {"c": ["2020-01-05"]}}],
        [[], [1, "x", None]],
    ],
)
def test_values_of_json_lines_are_those_of_the_file(tmp_path, golds):
    rows = [
        plain_row(0, reward_model={"ground_truth": gold}, extra_info={"seen": gold})
        for gold in golds
    ]
    for row, unread in zip(rows, [1, "a", None, [2], {"b": 3}], strict=False):
        row["unread"] = unread
    examples = list(lines_file(tmp_path / "a.jsonl", rows).examples(Problems()))
    read = [(row.ground_truth, row.extra_info["seen"]) for row in examples]
    assert read == [(gold, gold) for gold in golds]
    kinds = [(type(gold), type(seen)) for gold, seen in read]
    assert kinds == [(type(gold), type(gold)) for gold in golds]


def test_a_line_that_is_no_row_is_named_and_hides_no_other(tmp_path):
    good = json.dumps(plain_row(0)).encode()
    twice = good.replace(b'"data_source"', b'"prompt"')
    bad = [good[:50], b"[1]", b"3", good.replace(b"s0", b"\xe9"), b"[" * 100_000, twice]
    bad += [good.replace(b"s0", b"\\ud800"), good.replace(b'"prompt"', b'"question"')]
    (tmp_path / "a.JSONL").write_bytes(b"\xef\xbb\xbf" + b"\r\n\n".join([good, *bad, good]))
    file, problems = ExampleFile(tmp_path / "a.JSONL"), Problems()
    assert len(file) == len(bad) + 2
    assert [row.number for row in file.examples(problems)] == [0, len(bad) + 1]
    (line, rows), (missing, last) = ((rule, rows) for (_, rule, _), rows in problems.rows.items())
    assert "JSON" in line and [row.partition(":")[0] for row in rows] == [*"1234567"]
    assert missing == "prompt must not be empty" and last == ["8"]
    for place, text in enumerate([*bad, b"[{}]", "{}".encode("utf-16")]):
        (tmp_path / "first.jsonl").write_bytes(text)
        said = "no column" if place == len(bad) - 1 else "JSON"
        with pytest.raises(InputError, match=said) as caught:
            ExampleFile(tmp_path / "first.jsonl")
        assert len(caught.value.problems) == 1 and "parquet file" not in str(caught.value)


def test_batches_and_choices_give_the_same_rows(tmp_path, monkeypatch):
    file = ExampleFile(rows_file(tmp_path / "a.parquet", 25))
    monkeypatch.setattr("core.data.parquet.BATCH", 4)
    all_rows = list(file.examples(Problems()))
    assert [row.number for row in all_rows] == list(range(25))
    assert all_rows == [file.example(number) for number in range(25)]
    chosen = np.array([0, 3, 4, 11, 24])
    assert list(file.examples(Problems(), chosen)) == [all_rows[number] for number in chosen]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"reward_model": None},
            "reward_model must be a mapping with ground_truth in 1 row (1: NoneType)",
        ),
        (
            {"reward_model": {"style": "rule", "ground_truth": None}},
            "must be given where the style is not 'model'",
        ),
        ({"data_source": None}, "data_source must be a non-empty string in 1 row (1: None)"),
        ({"prompt": []}, "prompt must not be empty in 1 row (1)"),
        ({"prompt": [{"role": "user", "content": " \n"}]}, "prompt must not be empty in 1 row (1)"),
        ({"prompt": [{"role": "user", "content": None}]}, "prompt must hold text"),
        (
            {"prompt": [{"role": None, "content": "x"}]},
            "prompt must hold messages with role and content",
        ),
    ],
)
def test_a_bad_row_is_named_with_rule_and_fix(tmp_path, changes, line):
    good, lines = problems_of(
        tmp_path / "a.parquet", plain_row(0, prompt=CHAT), plain_row(1, prompt=CHAT) | changes
    )
    assert [row.number for row in good] == [0]
    assert len(lines) == 1 and lines[0].startswith(str(tmp_path / "a.parquet")) and line in lines[0]
    assert "; " in lines[0]
    with pytest.raises(InputError, match="row"):
        ExampleFile(tmp_path / "a.parquet").example(1)


def test_rows_that_are_fine_though_they_look_odd(tmp_path):
    model = {"style": "model", "ground_truth": None}
    rows = [
        plain_row(0),
        plain_row(1, reward_model=model),
        plain_row(2, extra_info=None, videos=[]),
    ]
    rows += [
        plain_row(number, text=text)
        for number, text in enumerate(('{"content": 1} is JSON. What is x?', "{x: 1}"), start=3)
    ]
    good, lines = problems_of(tmp_path / "a.parquet", *rows)
    assert (len(good), lines) == (5, [])
    called = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    (one,), lines = problems_of(tmp_path / "b.parquet", plain_row(0, prompt=called))
    assert (one.prompt, lines) == (tuple(called), [])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (dict(prompt=3), "prompt must be a string or a list of messages in 1 row (0: int)"),
        (dict(extra_info="x"), "extra_info must be a struct in 1 row (0: str)"),
        (dict(prompt=[{"role": "user", "content": [{"type": "image"}]}]), "prompt must hold text"),
        *(
            (dict(text=text), "prompt must not be a chat that was written as text")
            for text in (
                '[{"role": "user", "content": "q"}]',
                "[{'role': 'user', 'content': 'q'}]",
                '[{"name": "x", "role": "user", "content": "q"}]',
                '{"role": "user", "content": "q"}',
                '{"messages": [{"role": "user", "content": "q"}]}',
            )
        ),
        (dict(images="a.png"), "images must be a list of pictures in 1 row (0: str)"),
        (
            dict(videos=[b"frames"]),
            "column 'videos' holds media, which nothing here reads in 1 row (0); leave the",
        ),
    ],
)
def test_wrong_types_and_media_are_refused(tmp_path, row, said):
    _, (line,) = problems_of(tmp_path / "a.parquet", plain_row(0, **row))
    assert said in line


def test_a_ground_truth_that_pandas_lacks_is_missing(tmp_path):
    rows = [
        plain_row(number, reward_model={"style": "rule", "ground_truth": truth})
        for number, truth in enumerate((1.0, float("nan")))
    ]
    good, (line,) = problems_of(tmp_path / "a.parquet", *rows)
    assert len(good) == 1 and "ground_truth must be given" in line and "row (1" in line


def test_many_problems_are_ten_and_a_count(tmp_path):
    rows = [
        plain_row(index, **({"reward_model": None} if index % 2 else {})) for index in range(30)
    ]
    rows[0]["data_source"] = ""
    _, lines = problems_of(tmp_path / "a.parquet", *rows)
    assert len(lines) == 2
    assert (
        "in 15 rows (1: NoneType, 3: NoneType" in lines[1]
        and "19: NoneType and 5 more)" in lines[1]
    )


def test_files_that_cannot_be_read(tmp_path):
    def error(path):
        with pytest.raises(InputError) as caught:
            ExampleFile(path)
        (line,) = caught.value.problems
        assert line.startswith(f"{path}: ")
        return line

    assert "does not exist; python -m data_preprocess.gsm8k writes one" in error(
        tmp_path / "none.parquet"
    )
    assert "is a folder" in error(tmp_path)
    whole = rows_file(tmp_path / "whole.parquet", 50)
    (tmp_path / "half.parquet").write_bytes(Path(whole).read_bytes()[:-100])
    assert "not a readable parquet file" in error(tmp_path / "half.parquet")
    pq.write_table(pa.Table.from_pylist([plain_row(0)]).slice(0, 0), tmp_path / "empty.parquet")
    assert "has no rows" in error(tmp_path / "empty.parquet")
    columns = write_parquet(tmp_path / "columns.parquet", [{"prompt": "x", "question": "y"}])
    assert "no column 'data_source' (data.reward_fn_key), 'reward_model' (the schema)" in error(
        Path(columns)
    )


def test_names_and_hashes_say_when_rows_ask_the_same(tmp_path):
    rows = [
        plain_row(0),
        plain_row(0, extra_info={"split": "test", "index": 0}),
        plain_row(0, reward_model={"style": "rule", "ground_truth": "other"}),
        plain_row(0, source="t", text="s0"),
        plain_row(0, text="s0 "),
    ]
    file = ExampleFile(write_parquet(tmp_path / "a.parquet", rows))
    first, moved, regraded, renamed, reworded = file.examples(Problems())
    assert first.name == "s/train/0" and moved.name == "s/test/0" and renamed.name == "t/train/0"
    assert first.content_hash == moved.content_hash
    assert len({row.content_hash for row in (first, regraded, renamed, reworded)}) == 4
    assert first.prompt_hash == regraded.prompt_hash == renamed.prompt_hash != reworded.prompt_hash
    for index, name in (("9a9b", "s/-/9a9b"), ("", None), (1.0, None)):
        path = write_parquet(tmp_path / "b.parquet", [plain_row(0, extra_info={"index": index})])
        assert ExampleFile(path).example(0).name == name
