"""The page of all stages: which files belong to a stage, and what its cell says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.real import overview
from recipes.real.report import Stage

ROOT = Path(__file__).resolve().parents[3]
FILES = ("model", "sft_arithmetic", "real-arithmetic-seed1", "real-arithmetic-seed2", "real-arithmetic-random-seed1")


@pytest.fixture
def answers(tmp_path, monkeypatch) -> Path:
    """Answers of the arithmetic task to two prompts; seed 2 has both right."""
    folder = tmp_path / "answers_arithmetic"
    folder.mkdir()
    for name in FILES:
        (folder / f"{name}.jsonl").touch()
        (folder / f"{name}.scores-strict.jsonl").touch()
    acc = {"real-arithmetic-seed2": (1.0, 1.0)}
    load = lambda path, label: Stage(path.stem, ({}, {}), {"acc": acc.get(path.stem, (1.0, 0.0))})  # noqa: E731
    monkeypatch.setattr(overview.Stage, "load", load)

    def manifest(path: Path, kind: str) -> dict:
        trained = {"step": 60} if "seed" in path.stem else {}
        dtype = {"actor_rollout_ref.rollout.dtype": "bfloat16" if trained else "float32"}
        dtype |= {"actor_rollout_ref.actor.optim.lr": 1e-5} if trained else {}
        hardware = {"cpu": "a CPU", "instructions": "AVX2", "cores": 2, "gpus": []}
        return {"model": {"path": "x", **trained}, "config": dtype, "sessions": [{"hardware": hardware}]}

    monkeypatch.setattr(overview, "read_manifest", manifest)
    return tmp_path


def test_a_stage_has_its_own_files_and_says_seeds_steps_and_precision(answers):
    page = overview.overview(answers)
    lines = {line.split(" | ")[0].lstrip("| "): line for line in page.splitlines() if line.startswith("| ")}
    cells = {stage: line.split(" | ")[1] for stage, line in lines.items()}
    assert cells["then GRPO"] == "75.0 ± 35.4 [0.0, 100.0] (2 seeds, step 60, rate 1e-05, bfloat16)"
    assert re.fullmatch(r"50\.0 \[.*\] \(float32\)", cells["after fine-tuning"])
    assert cells["GRPO, reward a coin"].endswith("(1 seed, step 60, rate 1e-05, bfloat16)")
    assert cells["then DAPO"] == "not run" and "Answered on: 2 cores, a CPU, AVX2." in page


def test_the_command_beside_a_row_is_one_that_can_be_typed(subtests):
    for stage in overview.STAGES:
        with subtests.test(stage=stage):
            script, *words = overview.STAGES[stage][1].split()
            assert (ROOT / script).is_file()
            known = (ROOT / "recipes/real/common.sh").read_text(encoding="utf-8")
            assert all("=" in word or word == "TASK" or re.search(rf"\b{word}\b.*\)", known) for word in words)
