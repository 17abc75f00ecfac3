"""The report of an evaluation: strict and lenient readings beside each other, and pass@k as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core import evaluate
from results import report
from tests.tiny import tiny_model, tiny_tokenizer

VAL = "actor_rollout_ref.rollout.val_kwargs."
# What four answers to a question whose gold is 72 are: right, right for the lenient reading alone, wrong, none.
ANSWERS = ("so it is\n#### 72", "so it is\n#### $72.00", "#### 7", "no idea")


@pytest.fixture(scope="module")
def scores(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    tiny_model("llama", hidden_size=16, intermediate_size=16).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    prompts = [[{"role": "user", "content": "abcde"[: 1 + index % 5] + str(index)}] for index in range(10)]
    rows = [
        {
            **{"data_source": "openai/gsm8k", "prompt": prompt},
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"index": index, "split": "test"},
        }
        for index, prompt in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "test.parquet")
    keys = {
        **{"data.val_files": folder / "test.parquet", "data.max_prompt_length": 64, "data.max_response_length": 4},
        **{f"{VAL}n": 4, f"{VAL}do_sample": True, f"{VAL}temperature": 1.0, "trainer.device": "cpu"},
        **{"actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.dtype": "float32"},
        **{"trainer.cpu_threads": 1, "trainer.n_gpus_per_node": 1},
    }
    out = folder / "answers.jsonl"
    words = [f"{key}={value}" for key, value in keys.items()]
    assert evaluate.main(["generate", "grpo", "--model", str(folder / "model"), "--out", str(out), *words]) == 0
    lines = list(map(json.loads, out.read_text().splitlines()))
    assert len(lines) == 40
    for number, line in enumerate(lines):  # a question in two has nothing right
        text = ANSWERS[number % 4] if number // 4 % 2 == 0 else ANSWERS[2 + number % 2]
        line |= {"response": text, "segments": [{"role": "policy", "text": text}]}
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evaluate.main(["score", str(out)]) == 0
    return folder / "answers.scores-gsm8k.jsonl"


def test_both_readings_stand_beside_each_other_with_intervals(scores, capsys):
    assert report.main([str(scores)]) == 0
    assert "12.5 [" in capsys.readouterr().out  # one right of four, in every second question
    text = (scores.parent / "evaluation.md").read_text()
    line = next(one for one in text.splitlines() if one.startswith("| openai/gsm8k | mean@4 |"))
    _, source, metric, questions, strict, lenient, change, _ = (cell.strip() for cell in line.split("|"))
    assert questions == "10" and strict.startswith("12.5 [") and lenient.startswith("25.0 [")
    assert change.startswith("+12.5 [") and change.endswith("5 up, 0 down")
    assert "gsm8k" in text and "SHA-256" in text
    # the lenient scores are kept, and not made again
    made = scores.with_name("answers.scores-gsm8k-lenient.jsonl")
    before = made.stat().st_mtime_ns
    assert report.main([str(scores)]) == 0 and made.stat().st_mtime_ns == before


def test_several_are_compared_with_the_first_by_question(scores, tmp_path, capsys):
    for name in ("answers.jsonl", "answers.manifest.json"):
        (tmp_path / name.replace("answers", "better")).write_bytes(scores.with_name(name).read_bytes())
    better = tmp_path / "better.jsonl"
    lines = list(map(json.loads, better.read_text().splitlines()))
    for line in lines[:6]:  # all of the first question, half of the second one
        line |= {"response": ANSWERS[0], "segments": [{"role": "policy", "text": ANSWERS[0]}]}
    better.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evaluate.main(["score", str(better)]) == 0
    assert report.main([str(scores), str(tmp_path / "better.scores-gsm8k.jsonl"), "--out", str(tmp_path)]) == 0
    # 10 questions: +0.75, +0.5 and eight times 0
    assert "by question: +12.5 [" in (said := capsys.readouterr().out) and "2 up, 0 down on openai/gsm8k" in said
    heading, _, cells = (tmp_path / "evaluation.md").read_text().partition("## Beside each other")[2].split("\n")[2:5]
    assert "against model, scored by gsm8k, by question" in heading and "+12.5 [" in cells


def test_answers_that_changed_and_a_mix_of_kinds_are_refused(scores, tmp_path, capsys):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in scores.parent.glob("answers.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    answers = folder / "answers.jsonl"
    answers.write_text(answers.read_text() + "\n")
    assert report.main([str(folder / scores.name)]) == 2
    assert "score its answers again" in capsys.readouterr().err
    assert report.main([str(scores), str(tmp_path)]) == 2
    assert "name one kind at a time" in capsys.readouterr().err
