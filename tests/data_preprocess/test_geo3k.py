"""Geometry3K with its figures: rows as verl's scripts make them."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from core.data.prompts import PromptFiles, PromptStream
from core.rollout.tools import BaseTool, chosen_tools, load_listed
from core.vision.pictures import pixels
from data_preprocess import cli, geo3k, geo3k_multiturn_w_tool
from data_preprocess.schema import write_rows
from tests.pictures import modality, png, vision_tokenizer
from tests.row_files import data_config

ROOT = Path(__file__).resolve().parents[2]


def stream_of(path: Path) -> PromptStream:
    config = data_config(train_files=[str(path)], max_prompt_length=4096)
    return PromptStream(config, PromptFiles(config, vision_tokenizer(), modality()), 1)


def test_a_row_has_the_prompt_of_verls_script(tmp_path):
    decoded = Image.new("RGB", (30, 20), "blue")  # as datasets gives it
    examples = [
        {"problem": "<image>Find x.", "answer": "4", "images": [{"bytes": png(), "path": None}]},
        {"problem": "Find y.", "answer": "5", "images": [decoded]},
    ]
    rows = [geo3k.row(example, "train", index) for index, example in enumerate(examples)]
    assert rows[0]["prompt"][0]["content"].startswith(
        "<image>Find x. You FIRST think about the reasoning process"
    )
    assert (
        rows[0]["data_source"] == "hiyouga/geometry3k"
        and rows[0]["reward_model"]["ground_truth"] == "4"
    )
    assert rows[1]["prompt"][0]["content"].startswith("<image>Find y. ")
    assert geo3k.row({**examples[0], "answer": ""}, "train", 0) is None
    write_rows(tmp_path / "train.parquet", rows)
    stream = stream_of(tmp_path / "train.parquet")
    blue = next(
        p for p in (stream.prompt(i) for i in range(2)) if "Find y" in p.messages[0]["content"]
    )
    assert (pixels(blue.media.pictures[0]) == [0, 0, 255]).all()


def test_questions_of_one_text_are_shared_only_with_their_figure(tmp_path, capsys):
    def examples(picture: int) -> list[dict]:
        return [{"problem": "<image>Find x.", "answer": "4", "images": [{"bytes": png(picture)}]}]

    for pictures, said in ((1, 2), False), ((1, 1), True):
        cli._write(
            geo3k.SOURCE, {"train": examples(pictures[0]), "test": examples(pictures[1])}, tmp_path
        )
        assert ("1 questions are in both splits" in capsys.readouterr().out) is said


def test_with_tools_a_row_has_the_same_question_behind_a_system_message():
    example = {
        "problem": "<image>Find x.",
        "answer": "4",
        "images": [{"bytes": png(), "path": None}],
    }
    plain, made = geo3k.row(example, "test", 3), geo3k_multiturn_w_tool.row(example, "test", 3)
    assert made["prompt"][0] == {"role": "system", "content": geo3k_multiturn_w_tool.SYSTEM}
    assert made["prompt"][1:] == plain["prompt"] and made["images"] == plain["images"]
    tools = load_listed(ROOT / "recipes" / "lab" / "tools.yaml", BaseTool)
    assert list(chosen_tools(tools, made["extra_info"])) == ["calculator", "python"]
    assert geo3k_multiturn_w_tool.row({**example, "answer": ""}, "test", 3) is None
