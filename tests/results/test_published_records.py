"""What a published copy keeps of questions and answers: enough to compare it with any run, and no
machine's paths."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path

import pytest

from core.tracking.json_lines import json_line, read_jsonl
from core.tracking.run_manifest import ROOT
from results import report
from results.publish import publish
from results.reporting.comparison import accuracy_by_question
from results.reporting.run_reader import load_run
from results.reporting.summaries import summarise
from tests.core.synthetic import configured, make_run, records

SOURCE = "lab/hops"


def run_with_answers(folder: Path, *, rate: float = 0.2, questions: int = 200, **changes) -> Path:
    """A run whose samples.jsonl has an answer to every question, as a run with few questions
    has."""
    make_run(
        folder,
        configured({"trainer.experiment_name": folder.name, **changes}),
        questions=questions,
        rate=rate,
    )
    rows = [
        answer(step, r, folder.name)
        for step in (0, 20)
        for r in records(step, 1, questions, rate=rate)
    ]
    (folder / "samples.jsonl").write_text("".join(map(json_line, rows)), encoding="utf-8")
    return folder


def answer(step: int, record, text: str) -> dict:
    acc = record.values["acc"][0]
    named = {
        "uid": record.uid,
        "data_source": record.data_source,
        "acc": acc,
        "score": acc,
        "step": step,
    }
    return {
        **named,
        "input": f"question {record.uid}",
        "output": f"{text} at {step}",
        "gts": "p",
        "stop": "eos",
    }


def accuracy(step: int, rate: float = 0.2) -> dict[str, float]:
    return accuracy_by_question(records(step, 1, 200, rate=rate))[SOURCE]


def published_answers(run: Path, copy: Path, **changes) -> list[dict]:
    """The answers of the copy of a run whose answers were changed first."""
    if changes:
        rows = [{**row, **changes} for row in read_jsonl(run / "samples.jsonl")]
        (run / "samples.jsonl").write_text("".join(map(json_line, rows)))
    packed = (publish(run, copy) / "samples.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


def test_every_evaluation_is_kept_by_question_and_the_bytes_are_the_same_again(
    tmp_path, monkeypatch
):
    run = run_with_answers(tmp_path / "grpo" / "a")
    first = publish(run, tmp_path / "one" / "grpo" / "a")
    monkeypatch.setattr("time.time", lambda: 2e9)
    again = publish(run, tmp_path / "two" / "grpo" / "a")
    for name in ("validation.jsonl.gz", "samples.jsonl.gz", "summary.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    copy = load_run(first)
    assert list(copy.validation) == [0, 5, 10, 15, 20]
    assert all(copy.accuracy_at(step)[SOURCE] == accuracy(step) for step in copy.validation)
    assert (
        summarise(copy)["results"][0]["change"] == summarise(load_run(run))["results"][0]["change"]
    )


@pytest.mark.parametrize("name", ["validation.jsonl.gz", "samples.jsonl.gz"])
def test_a_cut_copy_is_one_line(tmp_path, capsys, name):
    copy = publish(run_with_answers(tmp_path / "grpo" / "a"), tmp_path / "results" / "grpo" / "a")
    path = copy / name
    path.write_bytes(path.read_bytes()[:-20])
    assert report.main([str(copy), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "damaged" in said and name in said and said.count("\n") == 1


def test_answers_lose_paths_and_hosts_keep_everything_else_and_are_shortened_from_the_middle(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.cluster")
    data = {"data.train_files": ("/pfs/jane/data/train.parquet",)}
    run, target = (
        run_with_answers(tmp_path / "grpo" / "a", questions=3, **data),
        tmp_path / "results" / "grpo" / "a",
    )
    kept = (
        "<think>1/2 and 60 km/h</think> </data/x> /boxed a / b \\frac{1}{2} "
        "https://example.com/usr/x </answer>"
    )
    secret = (
        f'File "/home/jane/x.py" in ~/private/y.py on node-17.cluster, {ROOT}/core/z.py, '
        f"/pfs/jane/data/q, {run}/s"
    )
    rows = published_answers(run, target, output=f"{kept} | {secret}", gts=["/scratch/jane/1"])
    text = rows[0]["output"]
    assert text.startswith(kept) and '"<path>/x.py"' in text and "on <host>" in text
    for name in ("jane", "node-17", str(ROOT), str(tmp_path), "pfs"):
        assert name not in json.dumps(rows), name
    text = published_answers(run, target, output="a" * 5000 + "#p")[0]["output"]
    assert len(text) < 4_010 and text.endswith("a#p") and " […] " in text
