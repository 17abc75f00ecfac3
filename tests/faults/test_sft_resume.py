"""A run of supervised fine-tuning, killed at any moment and resumed, ends as if nothing had
happened: to the bit."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.faults.kill_and_resume import AtPoint, compare_runs, run_uninterrupted, run_with_kills
from tests.recipes.sft_data import prepare, settings

# Checkpoints at 2, 4 and 6, of which two are kept; epochs of 13 chats end within steps of 4
KILLS = (
    AtPoint("update", 3),
    AtPoint("checkpoint_write", 4),
    AtPoint("sync", 5),
    AtPoint("checkpoint_rename", 6),
)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4], ids=["whole", "lora"])
def test_a_killed_run_is_resumed_to_the_bit(lora, tmp_path):
    files = prepare(tmp_path / "files")
    keys = settings(files, f"actor_rollout_ref.model.lora_rank={lora}")

    def command(folder: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "recipes.sft.main_sft",
            *keys,
            f"trainer.default_local_dir={folder}",
        ]

    whole = run_uninterrupted(command, tmp_path / "whole").folder
    outcome = run_with_kills(command, tmp_path / "killed", KILLS, random.Random(0))
    assert outcome.landed == KILLS
    assert compare_runs(whole, outcome.folder) == []
