"""GSM8K for an agent with tools: the questions of GSM8K, a system message, and tools that exist."""

from __future__ import annotations

import json
from pathlib import Path

from core.data.parquet import ExampleFile
from core.rollout.tools import BaseTool, chosen_tools, load_listed
from data_preprocess import gsm8k, gsm8k_multiturn_w_tool
from data_preprocess.cli import run

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def test_rows_are_gsm8ks_with_tools_that_the_file_has(tmp_path):
    files = [str(DATA / f"gsm8k_{split}.jsonl") for split in ("train", "test")]
    for split, path in zip(("train", "test"), files, strict=True):
        (tmp_path / f"{split}.jsonl").write_bytes(Path(path).read_bytes())
    arguments = ["--local_dir", str(tmp_path / "out"), "--local_dataset_path", str(tmp_path)]
    assert run(gsm8k_multiturn_w_tool.SOURCE, arguments) == 0
    file = ExampleFile(tmp_path / "out" / "test.parquet")
    examples = [json.loads(line) for line in Path(files[1]).read_text().splitlines()]
    assert len(file) == len(examples)
    row, plain = file.example(0), gsm8k.row(examples[0], "test", 0)
    assert row.prompt[0] == {"role": "system", "content": gsm8k_multiturn_w_tool.SYSTEM}
    assert (
        list(row.prompt[1:]) == plain["prompt"]
        and row.ground_truth == plain["reward_model"]["ground_truth"]
    )
    tools = load_listed(ROOT / "recipes" / "lab" / "tools.yaml", BaseTool)
    assert list(chosen_tools(tools, row.extra_info)) == list(gsm8k_multiturn_w_tool.TOOLS)
