"""Geometry3K with its figures: the rows of the real sample, where ``DATA_DIR`` has it, and of made-up ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from core.data.prompts import PromptStream
from core.rollout.tools import BaseTool, chosen_tools, load_listed
from core.vision.pictures import pixels
from data_preprocess import geo3k, geo3k_multiturn_w_tool
from data_preprocess.schema import write_rows
from reward_scores.geo3k import score
from tests.pictures import modality, png, vision_tokenizer
from tests.row_files import data_config

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(os.environ.get("DATA_DIR", "")) / "geometry3k_sample"


def stream_of(path: Path) -> PromptStream:
    config = data_config(train_files=[str(path)], max_prompt_length=4096)
    return PromptStream(config, vision_tokenizer(), 1, modality=modality())


def test_a_row_has_the_prompt_of_verls_script(tmp_path):
    decoded = Image.new("RGB", (30, 20), "blue")  # as datasets gives it
    examples = [
        {"problem": "<image>Find x.", "answer": "4", "images": [{"bytes": png(), "path": None}]},
        {"problem": "Find y.", "answer": "5", "images": [decoded]},
    ]
    rows = [geo3k.row(example, "train", index) for index, example in enumerate(examples)]
    assert rows[0]["prompt"][0]["content"].startswith("<image>Find x. You FIRST think about the reasoning process")
    assert rows[0]["data_source"] == "hiyouga/geometry3k" and rows[0]["reward_model"]["ground_truth"] == "4"
    assert rows[1]["prompt"][0]["content"].startswith("<image>Find y. ")
    assert geo3k.row({**examples[0], "answer": ""}, "train", 0) is None
    write_rows(tmp_path / "train.parquet", rows)
    stream = stream_of(tmp_path / "train.parquet")
    blue = next(p for p in (stream.prompt(i) for i in range(2)) if "Find y" in p.messages[0]["content"])
    assert (pixels(blue.media.pictures[0]) == [0, 0, 255]).all()


def test_with_tools_a_row_has_the_same_question_behind_a_system_message():
    example = {"problem": "<image>Find x.", "answer": "4", "images": [{"bytes": png(), "path": None}]}
    plain, made = geo3k.row(example, "test", 3), geo3k_multiturn_w_tool.row(example, "test", 3)
    assert made["prompt"][0] == {"role": "system", "content": geo3k_multiturn_w_tool.SYSTEM}
    assert made["prompt"][1:] == plain["prompt"] and made["images"] == plain["images"]
    tools = load_listed(ROOT / "recipes" / "lab" / "tools.yaml", BaseTool)
    assert list(chosen_tools(tools, made["extra_info"])) == ["calculator", "python"]
    assert geo3k_multiturn_w_tool.row({**example, "answer": ""}, "test", 3) is None


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="DATA_DIR names no folder with geometry3k_sample")
@pytest.mark.parametrize("script", [geo3k, geo3k_multiturn_w_tool])
def test_real_figures_are_read_and_their_answers_scored(tmp_path, script):
    examples = []
    for folder in sorted(SAMPLE.glob("[0-9]*")):
        data = json.loads((folder / "data.json").read_text())
        answer = data["choices"]["ABCD".index(data["answer"])]
        image = {"bytes": (folder / "img_diagram.png").read_bytes(), "path": None}
        examples.append({"images": [image], "problem": f"<image>{data['problem_text']}", "answer": answer})
    pq.write_table(pa.Table.from_pylist(examples), tmp_path / "train.parquet")  # as the hub has them
    out = tmp_path / "out"
    command = [sys.executable, "-m", script.__name__, "--local_dataset_path", tmp_path, "--local_dir", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"{out / 'train.parquet'}: 10 rows, sha256 " in done.stdout, done.stderr
    stream = stream_of(out / "train.parquet")
    prompts = [stream.prompt(ordinal) for ordinal in range(len(examples))]
    assert len({prompt.uid for prompt in prompts}) == len(examples) == 10
    with_tools = script is geo3k_multiturn_w_tool
    for prompt in prompts:
        (one,) = prompt.media.pictures
        assert prompt.token_ids.count(101) == one.tokens > 4
        assert pixels(one).std() > 5  # lines on paper
        assert score(f"<think>r</think> \\boxed{{{prompt.ground_truth}}}", prompt.ground_truth).value == 1
        assert [message["role"] for message in prompt.messages] == ["system"] * with_tools + ["user"]
        assert ("tool_selection" in prompt.extra_info) == with_tools
