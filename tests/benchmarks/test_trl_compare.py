"""The comparison with TRL: what it refuses before it starts, and rows of several machines in one table."""

from __future__ import annotations

import sys

import pytest

from tests.benchmarks.trl import compare

ROW = {
    "mode": "passages",
    "dtype": "fp32",
    "machine": "a processor, AVX2",
    "packed": True,
    "repeats": 2,
    "timed_steps": 1,
    "ratio": 6.07,
    "ratio_low": 2.41,
    "ratio_high": 15.31,
    "seconds": {"trl": 121.81, "ours": 20.02},
    "mean_length": {"trl": 32.0, "ours": 31.6},
}


@pytest.fixture
def refused(monkeypatch, tmp_path, capsys):
    """Start the comparison with these words and return what it refuses them with."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "measure", lambda *_: pytest.fail("it began to measure"))
    monkeypatch.delenv("DATA_DIR", raising=False)

    def start(*words):
        monkeypatch.setattr(sys, "argv", ["compare", "--trl-python", "python", "--out", str(tmp_path / "out"), *words])
        with pytest.raises(SystemExit) as stopped:
            compare.main()
        assert stopped.value.code == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err.splitlines()[-1]

    return start


@pytest.mark.parametrize("words, why", [("--repeats 1", "an interval needs two"), ("--steps 1", "first is not timed")])
def test_what_cannot_be_measured_is_refused(refused, words, why):
    assert f"{words}: must be at least 2" in (line := refused(*words.split())) and why in line


def test_a_missing_model_and_missing_data_are_refused_with_the_remedy(refused, tmp_path):
    assert "outputs/real/model is missing; make it with python -m recipes.real.prepare" in refused("--model", "real")
    (tmp_path / "outputs/real/model").mkdir(parents=True)
    (tmp_path / "outputs/real/model/config.json").write_text("{}")
    assert "set DATA_DIR to the folder with gsm8k/ and wiki_passages/" in refused("--model", "real")


def test_each_row_names_the_machine_that_measured_it():
    rows = [ROW, {**ROW, "dtype": "bf16", "machine": "a processor, AVX512", "peak_gib": {"trl": 19.4, "ours": 5.4}}]
    report = {"threads": 2, "versions": {"ours": "torch 2", "trl": "trl 1"}, "rows": rows}
    head, *lines = [line for line in compare.table(report).splitlines() if line.startswith("| ")]
    assert head.endswith("| GiB TRL / ours | machine |")
    assert [line.split(" | ")[-1] for line in lines] == ["a processor, AVX2 |", "a processor, AVX512 |"]
    assert "| not measured |" in lines[0] and "| 19.4 / 5.4 |" in lines[1]
