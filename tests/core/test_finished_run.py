"""A command whose run has finished: what is the same run, and what trains again."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.command_line import finished_folder
from core.config import compose, to_yaml
from core.tracking import run_manifest


@pytest.fixture
def command(tmp_path):
    def write(rows: int) -> None:
        pq.write_table(pa.table({"x": list(range(rows))}), tmp_path / "rows.parquet")

    def configured(*options: str):
        files = [f"data.{name}_files={tmp_path}/rows.parquet" for name in ("train", "val")]
        return compose("grpo", [*files, f"trainer.default_local_dir={tmp_path}/run", *options])

    write(1)
    config = configured()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    facts = {"run": "run", "recipe": "grpo", "run_id": "0", "sessions": [], "data": run_manifest.data_of(config)}
    end = tmp_path / "run" / "manifest.json"
    end.write_text(json.dumps({**facts, "status": "finished"}))
    return configured, write, lambda status: end.write_text(json.dumps({**facts, "status": status}))


def test_the_same_command_is_a_finished_run(command, tmp_path):
    configured, write, _ = command
    assert configured().trainer.save_freq == -1
    assert finished_folder(configured()) == tmp_path / "run"
    write(2)
    assert finished_folder(configured()) is None, "other data"


@pytest.mark.parametrize(
    "option",
    ["trainer.total_training_steps=9", "trainer.resume_mode=disable", "trainer.val_only=True", "trainer.seed=2"],
)
def test_another_command_is_another_run(command, option):
    assert finished_folder(command[0](option)) is None


@pytest.mark.parametrize("status", ["running", "failed", "stopped"])
def test_what_has_not_finished_goes_on(command, status):
    configured, _, end = command
    end(status)
    assert finished_folder(configured()) is None


def test_a_damaged_manifest_is_left_to_the_start(command, tmp_path):
    (tmp_path / "run" / "manifest.json").write_text("{")
    assert finished_folder(command[0]()) is None
