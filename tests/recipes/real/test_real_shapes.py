"""The real model where the tests elsewhere use tiny ones: decoding, resuming, exports, adapters, Ray with vLLM."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.kill_and_resume import AtPoint, compare_runs, run_uninterrupted, run_with_kills

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


def training(files: Path, *overrides: str) -> Callable[[Path], list[str]]:
    """Return a factory of GRPO runs with few short answers, which any reward of a length lets learn."""
    reward = files / "length.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 100\n"
    )
    data = files / "outputs" / "real"
    keys = [
        *(f"data.train_files={data}/instructions/train.parquet", f"data.val_files={data}/instructions/test.parquet"),
        *(f"actor_rollout_ref.model.path={data}/model", f"custom_reward_function.path={reward}"),
        *("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=1", f"{ROLLOUT}.n=2"),
        *("data.max_response_length=12", f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false"),
        *("trainer.test_freq=-1", "trainer.save_freq=1", "trainer.logger=[jsonl]"),
    ]
    return lambda folder: [
        *(sys.executable, "-m", "recipes.grpo.main_grpo", "preset=smollm2_135m", "--", *keys),
        *(f"trainer.default_local_dir={folder}", *overrides),
    ]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def export(run: Path, out: Path) -> None:
    subprocess.run([sys.executable, "-m", "core.export", run, out], check=True, cwd=ROOT, capture_output=True)


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


def test_a_killed_run_goes_on_to_the_same_bits_and_exports_what_it_trained(files, tmp_path):
    from transformers import AutoModelForCausalLM

    command = training(files)
    whole = run_uninterrupted(command, tmp_path / "whole").folder
    killed = run_with_kills(command, tmp_path / "killed", [AtPoint("update", 2)], random.Random(0))
    assert len(killed.landed) == 1 and compare_runs(whole, killed.folder) == []
    assert all(line["actor/grad_norm"] > 0 for line in metrics(whole))
    export(whole, tmp_path / "exported")
    trained, start = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (tmp_path / "exported", files / "outputs" / "real" / "model")
    )
    moved = max(float((a - b).abs().max()) for a, b in zip(trained.parameters(), start.parameters(), strict=True))
    assert 0 < moved < 1e-3
