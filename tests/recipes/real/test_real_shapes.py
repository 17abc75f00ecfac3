"""The real model where the tests elsewhere use tiny ones: decoding, resuming, exports, adapters, Ray with vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
STEPS, NEW_TOKENS = 3, 24

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("real")]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with ``outputs/real``: the model and the prompts."""
    folder = tmp_path_factory.mktemp("real")
    prepare = [sys.executable, "-m", "recipes.real.prepare"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(prepare, cwd=folder, check=True, env=environment, capture_output=True)
    return folder


def test_greedy_answers_are_those_of_transformers_generate(files):
    """Token by token, in float32, of 16 prompts that are decoded together here and alone there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = files / "outputs" / "real"
    answers = files / "answers.jsonl"
    keys = [f"data.val_files={data}/instructions/test.parquet", f"data.max_response_length={NEW_TOKENS}"]
    command = [sys.executable, "-m", "core.evaluate", "generate", "grpo", "--model", data / "model", "--out", answers]
    more = ["preset=smollm2_135m", *keys, "data.val_max_samples=16", f"{ROLLOUT}.dtype=float32"]
    subprocess.run([*command, *more], check=True, cwd=ROOT, capture_output=True)
    model = AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == 16
    for row in rows:
        prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        ours = row["response_ids"]
        with torch.no_grad():
            theirs = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert theirs[0, prompt.shape[1] :].tolist() == ours, tokenizer.decode(ours)
