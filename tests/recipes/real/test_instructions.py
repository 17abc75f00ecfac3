"""The instructions task: what is held out, and demonstrations that keep their constraints."""

from __future__ import annotations

import dataclasses
import json

import pytest

from core.errors import InputError
from recipes.real.demonstrations import demonstrations, write_demonstrations
from recipes.real.instructions import HELD_OUT, TRAIN, WORDING, instructions_of, opening, rewrite
from recipes.real.report import _lines
from reward_scores import scorer_for
from reward_scores.instructions import CHECKS

TEXT = (
    "Lighthouses are tall, bright towers that guide ships at night, keeping sailors safe. They "
    "are old. Some are red."
)


def test_held_out_prompts_share_no_topic_word_or_number_with_training():
    for field in dataclasses.fields(TRAIN):
        assert not set(getattr(TRAIN, field.name)) & set(getattr(HELD_OUT, field.name)), field.name


def test_every_kind_of_constraint_is_asked_for_and_every_ground_truth_can_be_checked():
    instructions = list(instructions_of(HELD_OUT, 200, seed=1))
    assert (
        {constraint[0] for one in instructions for constraint in one.constraints}
        == set(CHECKS)
        == set(WORDING)
    )
    scorer = scorer_for("real/instructions")
    assert all(scorer.problem(one.ground_truth) is None for one in instructions)


def test_a_rewritten_text_keeps_its_constraints():
    instructions = list(instructions_of(TRAIN, 300, seed=3))
    rewritten = [rewrite(one, TEXT) for one in instructions]
    assert sum(text is not None for text in rewritten) > 270
    scorer = scorer_for("real/instructions")
    assert all(
        scorer(text, one.ground_truth).value == 1
        for one, text in zip(instructions, rewritten, strict=True)
        if text
    )


def test_demonstrations_are_of_training_topics_and_differ():
    answers = [
        {"prompt": f"<user>{opening(topic)}</user>", "response": TEXT}
        for topic in TRAIN.topics[:20]
    ]
    rows = list(demonstrations(answers, 60))
    assert (
        len({(line["prompt"][0]["content"], line["response"]) for line in rows}) == len(rows) == 60
    )
    scorer = scorer_for("real/instructions")
    for line in rows:
        assert scorer(line["response"], line["reward_model"]["ground_truth"]).value == 1
        assert any(opening(topic) in line["prompt"][0]["content"] for topic in TRAIN.topics[:20])


def test_a_separator_in_an_answer_ends_no_line(tmp_path):
    answer = {
        "prompt": f"<user>{opening(TRAIN.topics[0])}</user>",
        "response": f"{TEXT}\u2028x\x85",
    }
    line = json.dumps(answer, ensure_ascii=False) + "\n"
    (tmp_path / "answers.jsonl").write_text(line, encoding="utf-8")
    write_demonstrations(tmp_path / "answers.jsonl", tmp_path / "out.parquet", 1)
    assert _lines(tmp_path / "answers.jsonl") == [answer]


def test_a_file_that_holds_no_answers_is_an_input_error(tmp_path):
    (tmp_path / "answers.jsonl").write_text("no json")
    with pytest.raises(InputError, match="core.evaluate generate"):
        write_demonstrations(tmp_path / "answers.jsonl", tmp_path / "out.parquet", 3)
