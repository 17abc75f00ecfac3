"""The scripts around the real model, with a Python that only writes down how it was called and makes the files that are
asked for: stages, minutes and names of ``recipes/real/run.sh``, and the rows that ``results/record.sh real`` makes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.real.overview import SCORES, STAGES, files_of

ROOT = Path(__file__).resolve().parents[3]
PYTHON = r"""#!/usr/bin/env bash
[[ -n "${DRY_RUN:-}" ]] && exit 0
echo "$*" >> "$CALLS"
case "$*" in
*"generate grpo"*"--out outputs/real/answers/released"*) echo "$(($(< "$CLOCK") + ${TAKES:-0}))" > "$CLOCK" ;;
esac
case "$*" in
*recipes.*.main_grpo*)
    folder="$(grep -o 'default_local_dir=[^ ]*' <<< "$*" | cut -d= -f2)"
    mkdir -p "$folder" && echo "${REACHES:-20}" > "$folder/latest_checkpointed_iteration.txt"
    ;;
*core.evaluate\ generate*)
    touch "$(grep -o -- '--out [^ ]*' <<< "$*" | cut -d' ' -f2)"
    ;;
esac
"""
INSTRUCTIONS_ONLY = (
    *("fine-tuning, other seeds too", "then PPO", "then DAPO"),
    *("GRPO, naive reward", "then GRPO, larger rate"),
)
SEEDS = ("real-seed", "real-naive", "real-lr", "ppo", "dapo", "sft-seed")
NOT_OF_SEARCH = (*INSTRUCTIONS_ONLY, "GRPO without fine-tuning")


@pytest.fixture
def clone(tmp_path):
    """Return a folder with the scripts alone, and the stand-in where ``make setup`` puts the Python."""
    for script in [
        *ROOT.glob("recipes/real/*.sh"),
        *ROOT.glob("recipes/*/run_smollm2_135m.sh"),
        ROOT / "results/record.sh",
    ]:
        copy = tmp_path / script.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, copy)
    for path, text in {".venv/bin/python": PYTHON, "bin/date": '#!/bin/sh\ncat "$CLOCK"\n'}.items():
        program = tmp_path / path
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)
    return tmp_path


def run_script(clone: Path, *words: str, **environment: str) -> tuple[list[str], list[str]]:
    """Return the lines that a script shows, and its calls of Python."""
    calls = clone / "calls.txt"
    calls.unlink(missing_ok=True)
    clock = clone / "clock.txt"
    clock.write_text("1000")
    done = subprocess.run(
        ["bash", *words],
        cwd=clone,
        env={
            **os.environ,
            "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "CLOCK": str(clock),
            "DRY_RUN": "",
            "REAL_DTYPE": "float32",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), calls.read_text().splitlines()


def whole_run(clone: Path, *words: str, **environment: str) -> tuple[list[str], list[str]]:
    return run_script(clone, "recipes/real/run.sh", *words, **environment)


def test_answers_are_named_by_the_step_that_the_run_reached(clone):
    assert "outputs/real/answers/grpo-20-steps.jsonl" in whole_run(clone)[1][-1]
    longer = whole_run(clone, "trainer.total_training_steps=40", REACHES="40")[1]
    assert "outputs/real/answers/grpo-40-steps.jsonl" in longer[-1] and "grpo-20-steps" not in "".join(longer)
    assert "recipes.real.report" in longer[-1] and "--scores guarded" in longer[-1]


@pytest.mark.parametrize("words", [("recipes/real/run.sh", "naive"), ("results/record.sh", "real")])
def test_guarded_scores_are_so_whatever_reward_the_run_had(clone, words):
    calls = [
        call for call in run_script(clone, *words)[1] if "core.evaluate score" in call and "--name guarded" in call
    ]
    assert any("naive" in call for call in calls)
    assert all(call.endswith("reward_model.reward_kwargs.instructions.method=guarded") for call in calls)


def test_every_row_of_the_overview_has_answers_that_one_command_makes(clone):
    run_script(clone, "results/record.sh", "real", REAL_AT_ONCE="4")
    missing = []
    for task in SCORES:
        for stage, (pattern, _) in STAGES.items():
            expected = 3 if pattern.startswith(SEEDS) else 1
            if stage in {"instructions": (), "search": NOT_OF_SEARCH}.get(task, INSTRUCTIONS_ONLY):
                continue
            if len(files_of(clone / f"outputs/real/answers_{task}", task, pattern)) != expected:
                missing.append((task, stage))
    assert not missing
