"""The run manifest is complete about where numbers come from, and survives damage."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from core.config.composition import compose
from core.config.convert import to_yaml
from core.config.defaults import resolve
from core.errors import InputError
from core.tracking import run_manifest
from core.tracking.tracker import Tracker
from recipes.dapo.config_schema import DAPOConfig
from tests.core.synthetic import configured, make_run


@pytest.mark.parametrize("text", ["", "[]", "\x00" * 50], ids=repr)
def test_a_damaged_manifest_is_named(text, tmp_path):
    make_run(tmp_path, steps=3, questions=5)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=f"{tmp_path}/manifest.json"):
        Tracker(tmp_path, configured(), resume_step=3, recipe="grpo")


def test_the_status_follows_how_the_run_ended(tmp_path):
    def status() -> str:
        return json.loads((tmp_path / "a" / "manifest.json").read_text())["status"]

    tracker = Tracker(tmp_path / "a", configured())
    assert status() == "running"
    tracker.close("finished")
    tracker.close("failed")
    assert status() == "finished"


def test_the_manifest_has_where_numbers_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.orig_argv", ["python", "-m", "recipes.grpo.main_grpo", "a=[1, 2]", "b.api_key=geheim"]
    )
    data = tmp_path / "train.parquet"
    data.write_bytes(b"rows")
    config = configured(
        {"trainer.seed": 7, "trainer.experiment_name": "x", "data.train_files": (str(data),)}
    )
    tracker = Tracker(tmp_path / "grpo" / "lab_s7", config)
    tracker.set_total(20)
    tracker.close("finished")
    text = (tmp_path / "grpo" / "lab_s7" / "manifest.json").read_text()
    manifest = json.loads(text)
    assert (manifest["recipe"], manifest["run"], manifest["total_steps"]) == ("grpo", "lab_s7", 20)
    assert manifest["seeds"] == {"trainer.seed": 7, "data.seed": None}
    sha256 = hashlib.sha256(b"rows").hexdigest()
    assert manifest["data"] == [{"path": str(data), "bytes": 4, "sha256": sha256}]
    (session,) = manifest["sessions"]
    assert session["packages"]["numpy"] == np.__version__
    assert session["hardware"]["cores"] >= 1 and session["hardware"]["cpu"]
    assert (
        session["command"].startswith("python -m recipes.grpo.main_grpo 'a=[1, 2]'")
        and "geheim" not in text
    )
    assert session["started"] <= session["ended"]


def test_a_recipe_with_keys_of_its_own_is_known_in_any_folder(tmp_path):
    tracker = Tracker(tmp_path / "mine" / "run", resolve(DAPOConfig(), "dapo"))
    tracker.close("finished")
    assert tracker.manifest["recipe"] == "dapo"


def test_the_configuration_is_kept_whole_and_its_changes_are_those_that_were_made(tmp_path):
    overrides = [
        "data.train_files=a.parquet",
        "actor_rollout_ref.actor.clip_ratio_c=4.0",
        "trainer.experiment_name=x",
    ]
    config = compose("grpo", overrides)
    tracker = Tracker(tmp_path / "grpo" / "run", config)
    tracker.close("finished")
    assert (tracker.run_dir / "config.yaml").read_text() == to_yaml(config)
    changed = tracker.manifest["changed_from_defaults"]
    assert (
        changed["actor_rollout_ref.actor.clip_ratio_c"] == [3.0, 4.0]
        and "trainer.seed" not in changed
    )


def git(folder: Path, *command: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *command], check=True, capture_output=True)


def test_git_state_sees_every_change(tmp_path):
    assert run_manifest.git_state(tmp_path) == {"commit": None, "dirty": None, "diff_sha256": None}
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    clean = run_manifest.git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False and clean["diff_sha256"] is None
    (tmp_path / "results/run").mkdir(parents=True)
    (tmp_path / "results/run/summary.json").write_text("{}\n")
    assert run_manifest.git_state(tmp_path) == clean, (
        "what an earlier run has left is no change of the code"
    )
    hashes = set()
    for name, text in (("a.py", "x = 2\n"), ("a.py", "x = 3\n"), ("new.py", "y = 1\n")):
        (tmp_path / name).write_text(text)
        state = run_manifest.git_state(tmp_path)
        assert state["dirty"] is True
        hashes.add(state["diff_sha256"])
    assert len(hashes) == 3
    (tmp_path / "inside").mkdir()
    # Somebody else's checkout around ours
    assert run_manifest.git_state(tmp_path / "inside")["commit"] is None


def test_git_is_not_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_manifest.git_state()["commit"] is None
    assert run_manifest.hardware()["gpus"] == []
