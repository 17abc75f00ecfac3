"""Command lines that other people published compose here unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.command_line import prepare

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "tests" / "commands"
LINES = sorted(COMMANDS.glob("*.args"))
# Every other one is a line of main_ppo
RECIPES = {"grpo": "grpo", "dapo": "dapo", "search_r1": "search_r1"}


ROW = pa.Table.from_pylist(
    [{"data_source": "x", "prompt": "y", "reward_model": {"ground_truth": "z"}}]
)


def arguments(path):
    found = path.read_text().splitlines()
    # its own model has 28 heads, which 8 ranks cannot share: it is refused, there at the start as
    # well
    model = "actor_rollout_ref.model.path="
    return [
        f"{model}Qwen/Qwen2.5-32B" if text.startswith(model) and path.stem == "dapo" else text
        for text in found
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for name in ("train", "more", "test"):
        pq.write_table(ROW, tmp_path / "data" / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_published_line_validates_in_one_process_and_for_a_cluster(
    folder, monkeypatch, capsys, subtests
):
    monkeypatch.setenv("DRY_RUN", "1")
    for path in LINES:
        for cluster in ([], ["trainer.backend=ray", "actor_rollout_ref.rollout.name=vllm"]):
            with subtests.test(path=path, cluster=cluster):
                with pytest.raises(SystemExit) as end:
                    prepare(RECIPES.get(path.stem, "ppo"), [*arguments(path), *cluster])
                assert (end.value.code, capsys.readouterr().err) == (0, "")


def test_the_entry_point_runs_it_dry(folder, subtests):
    """As a person types it; it imports neither torch nor ray nor vllm, and writes nothing."""
    for name in ["ppo", "grpo", "dapo", "search_r1"]:
        with subtests.test(name=name):
            environment = {
                **os.environ,
                "DRY_RUN": "1",
                "PYTHONPATH": str(ROOT),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            # -v would say so too; this says only what was imported when the process ends
            hook = folder / "sitecustomize.py"
            hook.write_text(
                "import atexit, sys\n"
                "heavy = ('torch', 'ray', 'vllm', 'transformers')\n"
                "atexit.register(lambda: print('imported:', [m for m in heavy if m in "
                "sys.modules]))\n"
            )
            before = sorted(folder.rglob("*"))
            command = [
                sys.executable,
                "-m",
                f"recipes.{name}.main_{name}",
                *arguments(COMMANDS / f"{name}.args"),
            ]
            environment["PYTHONPATH"] += os.pathsep + str(folder)
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert "imported: []" in done.stdout and "valid" in done.stdout
            assert sorted(folder.rglob("*")) == before
