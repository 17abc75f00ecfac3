"""What a run shows in the terminal when it ends."""

from __future__ import annotations

import json

import pytest

from results.reporting.run_reader import load_run
from results.reporting.run_report import closing_lines
from tests.core.synthetic import configured, make_run


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "grpo" / "lab"
    make_run(run, configured({"trainer.experiment_name": "lab"}))
    return run


def sample(step, uid, output, score):
    row = {
        "step": step,
        "uid": uid,
        "input": f"what is\n{uid}?",
        "output": output,
        "gts": "7",
        "score": score,
    }
    return json.dumps(row)


def test_a_finished_run_shows_its_curve_and_the_question_whose_score_rose_most(folder):
    rows = [
        sample(0, "a", "1", 1.0),
        sample(0, "b", "no", 0.0),
        sample(9, "a", "1", 1.0),
        sample(9, "b", "7" * 200, 1),
    ]
    (folder / "samples.jsonl").write_text("\n".join(rows) + "\n")
    curve, question, before, after = closing_lines(load_run(folder))
    assert curve.startswith("accuracy on ") and "▁" in curve and "█" in curve
    first, last = (float(word.rstrip("%,")) for word in curve.split() if "%" in word)
    assert last > first
    assert question == "question: what is b?   expected: 7"
    assert before == "    step 0: no   score 0"
    assert (
        after.startswith("    step 9: 777")
        and "[…]" in after
        and after.endswith("score 1")
        and len(after) < 140
    )


def test_no_answer_acts_on_the_terminal(folder):
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\u202e\x9b2J"
    rows = [sample(0, f"a{evil}", evil, 0.0), sample(9, f"a{evil}", f"7{evil}", 1.0)]
    (folder / "samples.jsonl").write_text("\n".join(rows) + "\n")
    text = "\n".join(closing_lines(load_run(folder)))
    assert (
        "\\x1b]52" in text and "\\u202e" in text and all(c.isprintable() or c == "\n" for c in text)
    )
