import os

import pyarrow.parquet as pq
import pytest

from core.data.parquet import ExampleFile
from core.errors import InputError, Problems
from core.files import file_sha256
from data_preprocess.schema import make_row, write_rows


def rows(count=3):
    return [make_row("s", f"q{n}", str(n), "math", split="train", index=n) for n in range(count)]


def test_what_is_written_reads_back(tmp_path):
    written = write_rows(tmp_path / "new" / "train.parquet", rows())
    assert (written.rows, written.sha256) == (3, file_sha256(written.path))
    assert str(written) == f"{written.path}: 3 rows, sha256 {written.sha256}"
    assert pq.read_table(written.path).to_pylist() == rows()
    assert [row.name for row in ExampleFile(written.path).examples(Problems())] == [
        f"s/train/{n}" for n in range(3)
    ]
    again = write_rows(tmp_path / "again.parquet", rows())
    assert again.sha256 == written.sha256


def test_a_bad_row_leaves_the_old_file_as_it_was(tmp_path, subtests):
    for bad, message in [
        ([], "there are no rows to write"),
        (
            [*rows(2), make_row("s", "q", None, "math")],
            "must be given where the style is not 'model' in 1 row (2",
        ),
        ([*rows(2), make_row("s", " ", "1", "math")], "prompt must not be empty in 1 row (2)"),
        ([*rows(2), make_row("s", "q", 3, "math")], "do not fit into one schema"),
        ([{"prompt": "x"}], "no column 'data_source'"),
    ]:
        with subtests.test(bad=bad, message=message):
            path = tmp_path / "train.parquet"
            before = write_rows(path, rows()).sha256
            with pytest.raises(InputError) as caught:
                write_rows(path, bad)
            assert (
                message in str(caught.value)
                and str(path) in str(caught.value)
                and ".part" not in str(caught.value)
            )
            assert file_sha256(path) == before
            assert os.listdir(tmp_path) == ["train.parquet"]


def test_an_interrupted_write_leaves_no_half_file(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_rows(tmp_path / "train.parquet", rows())
    assert os.listdir(tmp_path) == []


def test_a_field_that_is_null_throughout_is_text(tmp_path):
    """So the training and the test file of a data set have the same types."""
    without = [make_row("s", "q", "1", "math", index=0, level=None)]
    with_level = [make_row("s", "q", "1", "math", index=0, level="Level 3")]
    schemas = [
        pq.read_schema(write_rows(tmp_path / f"{n}.parquet", r).path)
        for n, r in enumerate((without, with_level))
    ]
    assert schemas[0].equals(schemas[1])
