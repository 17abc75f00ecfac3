"""The run folder: on disk before the next step, the same after a kill and a resume, and complete about its origin."""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from core.config import Config, compose, convert, examine, from_yaml, paths
from core.errors import InputError, WriteFailed
from core.files import durable_files
from core.files.durable_files import write_atomic
from core.tracking import run_manifest
from core.tracking import tracker as tracking
from core.tracking.loggers import LoggedRun
from core.tracking.metrics import data_metrics, progress_metrics
from core.tracking.records import read_jsonl
from core.tracking.samples import generation_rows, spread_out
from core.tracking.tracker import Tracker, dump_jsonl
from core.types import Prompt, ScoredGroup, Segment, StepMetrics, Stop, Trajectory
from reward_scores.score import Score
from tests.core.synthetic import configured, make_run, records, sample_rows, step_metrics
from tests.padded import batch_of_padded

ROOT = Path(__file__).parents[3]


def metrics_of(step: int, **values: float) -> StepMetrics:
    metrics = StepMetrics(step)
    metrics.add(values or {"critic/score/mean": 0.1 * step})
    return metrics


def with_trainer(**changes) -> Config:
    return configured({f"trainer.{name}": value for name, value in changes.items()})


# --- metrics.jsonl ---


def test_a_step_is_on_disk_when_log_returns(tmp_path):
    tracker = Tracker(tmp_path / "grpo" / "run", configured())
    value = 0.1 + 0.2  # a number with no short decimal form
    tracker.log(metrics_of(1, **{"critic/score/mean": value}))
    assert read_jsonl(tracker.run_dir / "metrics.jsonl") == [{"step": 1, "critic/score/mean": value}]
    tracker.close("finished")


def test_steps_rise(tmp_path):
    tracker = Tracker(tmp_path, configured())
    tracker.log(metrics_of(0))
    tracker.log(metrics_of(1))
    with pytest.raises(ValueError, match="step 1 logged after 1"):
        tracker.log(metrics_of(1))
    tracker.close("failed")


CRASHING = """
import os, signal
from tests.core.synthetic import *
tracker = Tracker({folder!r}, configured())
for step in range(8):
    tracker.log(step_metrics(step, 1))
    tracker.log_validation(step, records(step, 1, 5))
    tracker.log_samples(step, sample_rows(step))
with open(tracker.run_dir / "metrics.jsonl", "a") as file:
    file.write('{{"step": 8, "critic/sc')  # killed while writing step 8
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_and_resumed_is_the_same_as_never_interrupted(tmp_path):
    def finish(tracker: Tracker, start: int) -> None:
        for step in range(start, 12):
            tracker.log(step_metrics(step, 1))
            tracker.log_validation(step, records(step, 1, 5))
            tracker.log_samples(step, sample_rows(step))
        tracker.close("finished")

    code = CRASHING.format(folder=str(tmp_path / "killed"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    run_id = json.loads((tmp_path / "killed" / "manifest.json").read_text())["run_id"]
    finish(Tracker(tmp_path / "killed", configured(), resume_step=5), 6)
    finish(Tracker(tmp_path / "whole", configured()), 0)
    names = ["metrics.jsonl", "samples.jsonl", *(f"validation/{step}.jsonl" for step in range(12))]
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    manifest = json.loads((tmp_path / "killed" / "manifest.json").read_text())
    assert manifest["run_id"] == run_id and manifest["status"] == "finished"
    assert [s["resumed_from_step"] for s in manifest["sessions"]] == [None, 5]
    assert [s["ended"] is None for s in manifest["sessions"]] == [True, False]


def test_later_validations_are_dropped_on_resume(tmp_path):
    make_run(tmp_path, steps=10, questions=5)
    Tracker(tmp_path, configured(), resume_step=7).close("stopped")
    assert sorted(path.name for path in (tmp_path / "validation").iterdir()) == ["0.jsonl", "5.jsonl"]
    assert {row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")} == {0, 5}
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 7


DAMAGE = {
    "cut": b'{"step": 1, "critic/sc',
    "no JSON": b"\x00\x00\x00\x00",
    "a flipped bit": b'{"step": 1, "critic/score/mean": \xb00.1}',
    "two lines in one": b'{"step": 1}{"step": 2}',
    "no mapping": b"[1, 2]",
    "a number": b"7",
    "no step": b'{"critic/score/mean": 0.1}',
    "a step that is text": b'{"step": "1"}',
    "nested too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_is_set_aside_on_resume(kind, name, tmp_path, caplog):
    make_run(tmp_path, steps=3, questions=5)
    path = tmp_path / name
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], DAMAGE[kind], *lines[1:]]) + b"\n")
    Tracker(tmp_path, configured(), resume_step=3).close("stopped")
    assert path.read_bytes().splitlines() == lines
    assert DAMAGE[kind] in (tmp_path / f"{name}.damaged").read_bytes().splitlines()
    assert f"{name}: 1 damaged lines (line 2: " in caplog.text
    caplog.clear()
    Tracker(tmp_path, configured(), resume_step=3).close("stopped")
    assert caplog.text == "", "it is said once"


def test_a_reader_names_the_damaged_line(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": \n{"a": 2}\n{"a"')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: "):
        read_jsonl(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("text", ["", "[]", "\x00" * 50, '{"run": 1}'], ids=repr)
def test_a_damaged_manifest_is_written_anew_on_resume(text, tmp_path, caplog):
    make_run(tmp_path, steps=3, questions=5)
    (tmp_path / "manifest.json").write_text(text)
    Tracker(tmp_path, configured(), resume_step=3, recipe="grpo").close("finished")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"] == "finished" and manifest["recipe"] == "grpo" and "damaged" in manifest["rebuilt"]
    assert [one["resumed_from_step"] for one in manifest["sessions"]] == [3]
    assert (tmp_path / "manifest.json.damaged").read_text() == text
    assert "manifest.json is damaged" in caplog.text and "written anew" in caplog.text


def test_files_of_other_names_do_not_block_a_resume(tmp_path):
    make_run(tmp_path, steps=3, questions=5)
    for name in ("validation/notes.jsonl", "trace/step_old.npz", "previous/1a/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a person's own")
    Tracker(tmp_path, configured(), resume_step=2).close("stopped")
    assert (tmp_path / "validation" / "notes.jsonl").exists()
    Tracker(tmp_path, configured()).close("stopped")
    assert (tmp_path / "previous" / "1" / "trace" / "step_old.npz").exists()


def test_half_a_surrogate_pair_is_kept_as_an_escape(tmp_path):
    tracker = Tracker(tmp_path, configured())
    rows = [{**row, "output": "a\ud800b"} for row in sample_rows(1)]
    tracker.log_samples(1, rows)
    assert {row["output"] for row in read_jsonl(tmp_path / "samples.jsonl")} == {"a\ud800b"}
    tracker.close("finished")


# --- a disk that takes nothing ---


@contextmanager
def full_disk(limit: int = 0):
    """No file may grow beyond ``limit`` bytes: a write fails with EFBIG, of which the system writes what fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_records_and_no_line_of_metrics(tmp_path, caplog):
    tracker = Tracker(tmp_path, configured())
    tracker.log(metrics_of(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with full_disk(len(before) + 7):
        for step in (2, 3):
            tracker.log(metrics_of(step))
            tracker.log_samples(step, sample_rows(step))
            tracker.log_validation(step, records(step, 1, 5))
            tracker.dump(tmp_path / "answers", step, sample_rows(step))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before, "no part of a line"
    assert caplog.text.count("File too large") == 4, "each is said once"
    assert "samples.jsonl could not be written (File too large; " in caplog.text and "GiB free" in caplog.text
    assert not list(tmp_path.rglob("*.partial")) and not list((tmp_path / "answers").iterdir())
    tracker.log(metrics_of(4))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "metrics.jsonl can be written again" in caplog.text
    tracker.close("finished")
    dropped = json.loads((tmp_path / "manifest.json").read_text())["sessions"][-1]["records_dropped"]
    assert dropped == {"metrics.jsonl": 2, "samples.jsonl": 2, "validation": 2, "answers": 2}


@pytest.mark.parametrize("status", ["failed", "stopped", "finished"])
def test_the_status_is_written_on_a_full_disk(status, tmp_path):
    tracker = Tracker(tmp_path, configured())
    size = (tmp_path / "manifest.json").stat().st_size
    with full_disk(size):
        tracker.note("stopped_because", "x" * 100)
        tracker.close(status)
    assert json.loads((tmp_path / "manifest.json").read_text())["status"] == status
    assert (tmp_path / "manifest.json").stat().st_size == size


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path):
    with full_disk(10), pytest.raises(WriteFailed) as raised:
        Tracker(tmp_path, configured())
    text = str(raised.value)
    assert str(tmp_path) in text and "File too large" in text and "GiB free" in text and "make room" in text
    assert "\n" not in text


def test_a_gap_is_said(tmp_path, capsys):
    make_run(tmp_path, steps=3, questions=5)
    Tracker(tmp_path, configured(), resume_step=9).close("stopped")
    assert "resumed after step 9, but metrics.jsonl ends at step 3" in capsys.readouterr().err
    assert "gap" in json.loads((tmp_path / "manifest.json").read_text())["sessions"][-1]


def test_a_fresh_start_sets_the_earlier_run_aside(tmp_path):
    make_run(tmp_path, steps=3, questions=5)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    make_run(tmp_path, steps=1, questions=5)
    make_run(tmp_path, steps=1, questions=5)
    assert (tmp_path / "previous" / "1" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "previous" / "2" / "validation").is_dir()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]


def test_files_are_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(durable_files, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


# --- status ---


def test_the_status_follows_how_the_run_ended(tmp_path):
    def status(name: str) -> str:
        return json.loads((tmp_path / name / "manifest.json").read_text())["status"]

    tracker = Tracker(tmp_path / "a", configured())
    assert status("a") == "running"
    tracker.close("finished")
    assert status("a") == "finished"
    tracker.close("failed")
    assert status("a") == "finished"
    with pytest.raises(ValueError, match="'done'.*finished, stopped, failed"):
        tracker.close("done")


# --- manifest ---


def test_the_manifest_says_where_numbers_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "recipes.grpo.main_grpo", "a=[1, 2]"])
    data = tmp_path / "train.parquet"
    data.write_bytes(b"rows")
    config = configured({"trainer.seed": 7, "trainer.experiment_name": "x", "data.train_files": (str(data),)})
    tracker = Tracker(tmp_path / "grpo" / "lab_s7", config)
    tracker.progress(20)
    tracker.close("finished")
    manifest = json.loads((tmp_path / "grpo" / "lab_s7" / "manifest.json").read_text())
    assert (manifest["recipe"], manifest["run"], manifest["total_steps"]) == ("grpo", "lab_s7", 20)
    assert manifest["seeds"] == {"trainer.seed": 7, "data.seed": None}
    sha256 = hashlib.sha256(b"rows").hexdigest()
    assert manifest["data"] == [{"path": str(data), "bytes": 4, "sha256": sha256}]
    assert manifest["changed_from_defaults"]["trainer.seed"] == [1, 7]
    session = manifest["sessions"][0]
    assert session["packages"]["numpy"] == np.__version__
    assert session["hardware"]["cores"] >= 1 and session["hardware"]["cpu"]
    assert session["command"] == "python -m recipes.grpo.main_grpo 'a=[1, 2]'"
    assert session["started"] <= session["ended"]
    assert yaml.safe_load((tmp_path / "grpo" / "lab_s7" / "config.yaml").read_text())["trainer"]["seed"] == 7


def test_changed_keys_reach_into_mappings_of_the_users_own():
    config = compose("grpo", ["+actor_rollout_ref.rollout.engine_kwargs.hf.cache_gib=2"])
    key = "actor_rollout_ref.rollout.engine_kwargs.hf.cache_gib"
    assert run_manifest.changed_keys(config, "grpo")[key] == [None, 2]


def test_changed_keys_reach_into_nested_parts():
    config = convert.replaced(Config(), {"actor_rollout_ref.actor.optim.lr": 3e-6})
    assert run_manifest.changed_keys(config, "ppo") == {"actor_rollout_ref.actor.optim.lr": [1e-6, 3e-6]}


def test_a_real_configuration_is_kept_whole_and_its_changes_are_those_that_were_made(tmp_path):
    overrides = ["data.train_files=a.parquet", "actor_rollout_ref.actor.clip_ratio=0.3", "trainer.seed=5"]
    plain, config = compose("grpo"), compose("grpo", overrides)
    tracker = Tracker(tmp_path / "grpo" / "run", config)
    tracker.close("finished")
    assert from_yaml((tracker.run_dir / "config.yaml").read_text()) == config
    before, now = (run_manifest.changed_keys(each, "grpo") for each in (plain, config))
    made = {key: pair[1] for key, pair in now.items() if before.get(key) != pair}
    assert made == {
        "data.train_files": ["a.parquet"],
        "actor_rollout_ref.actor.clip_ratio": 0.3,
        "trainer.seed": 5,
    }
    assert tracker.manifest["changed_from_defaults"] == now


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
    assert run_manifest.git_state(tmp_path) == clean, "what an earlier run has left is no change of the code"
    hashes = set()
    for name, text in (("a.py", "x = 2\n"), ("a.py", "x = 3\n"), ("new.py", "y = 1\n"), ("new.py", "y = 2\n")):
        (tmp_path / name).write_text(text)
        state = run_manifest.git_state(tmp_path)
        assert state["dirty"] is True
        hashes.add(state["diff_sha256"])
    assert len(hashes) == 4
    (tmp_path / "inside").mkdir()
    assert run_manifest.git_state(tmp_path / "inside")["commit"] is None  # somebody else's checkout around ours


def test_git_is_not_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_manifest.git_state()["commit"] is None
    assert run_manifest.hardware()["gpus"] == []


# --- loggers ---


def test_the_console_shows_one_line_a_step(tmp_path, capsys):
    tracker = Tracker(tmp_path, with_trainer(logger=("console",)))
    tracker.progress(20)
    metrics = step_metrics(3, 1)
    metrics.add({"val-core/lab/hops/acc/mean@1": 0.5, "val-aux/lab/hops/acc/mean@1/ci_low": 0.4})
    tracker.log(metrics)
    tracker.close("finished")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 3/20 | reward 0.6")
    for label in ("acc 0.", "length ", "entropy ", "kl ", "time 1.", "lab/hops/acc/mean@1 0.500"):
        assert label in line
    assert "ci_low" not in line


@pytest.mark.parametrize(
    ("values", "shown", "hidden"),
    [
        ({"reward/failed_rate": 0.125}, ["| scorer failed on 12.5%"], []),
        ({"reward/val_failed_rate": 0.5}, ["| scorer failed in validation on 50.0%"], []),
        ({"reward/failed_rate": 0.0}, [], ["failed"]),
        ({"critic/score/min": -1.0, "critic/score/mean": 0.2, "reward/acc/mean": 0.2}, ["reward 0.2"], ["acc"]),
        ({"critic/score/min": -1.0, "critic/score/mean": 0.2, "reward/acc/mean": 0.6}, ["acc 0.600"], []),
        ({"val-core/x/acc/mean@1": 0.2, "val-aux/x/acc/min": -1.0}, ["x/score/mean@1 0.200"], ["acc"]),
    ],
)  # fmt: skip
def test_the_console_says_what_failed_and_calls_no_score_an_accuracy(tmp_path, capsys, values, shown, hidden):
    tracker = Tracker(tmp_path, with_trainer(logger=("console",)))
    tracker.log(metrics_of(3, **values))
    tracker.close("finished")
    line = capsys.readouterr().out
    assert all(one in line for one in shown) and not any(one in line for one in hidden), line


def test_a_terminal_gets_a_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tracker = Tracker(tmp_path, with_trainer(logger=("console",)))
    tracker.progress(4)
    for step in range(1, 5):
        tracker.log(step_metrics(step, 1))
    tracker.close("finished")
    shown = capsys.readouterr()
    assert "4/4" in shown.err and "reward=0." in shown.err and "length=" in shown.err
    assert "step 4/4 | reward" in shown.out


def test_tensorboard_forgets_what_follows_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = with_trainer(logger=("tensorboard",), log_val_generations=2)
    tracker = Tracker(tmp_path, config)
    for step in range(1, 5):
        tracker.log(metrics_of(step, reward=float(step)))
    tracker.log_samples(4, sample_rows(4))
    tracker.close("failed")
    time.sleep(1.1)  # event files are read in the order of their names, which hold the second of their start
    tracker = Tracker(tmp_path, config, resume_step=2)
    tracker.log(metrics_of(3, reward=30.0))
    tracker.close("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_wandb_works_offline_and_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = with_trainer(logger=("wandb",), log_val_generations=2)
    tracker = Tracker(tmp_path, config)
    tracker.log(metrics_of(1))
    tracker.log_samples(1, sample_rows(1))
    run_id = tracker.manifest["run_id"]
    tracker.close("finished")
    Tracker(tmp_path, config, resume_step=1).close("finished")
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert runs and all(name.endswith(run_id) for name in runs)


def test_wandb_gets_group_and_tags(tmp_path, monkeypatch):
    import wandb

    given = {}
    run = SimpleNamespace(log=lambda *a, **k: None, finish=lambda exit_code: None)
    monkeypatch.setattr(wandb, "init", lambda **arguments: given.update(arguments) or run)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "recipes.grpo.main_grpo", "preset=a", "preset=lab"])
    name = {"trainer.experiment_name": "lab-seed7", "trainer.seed": 7, "trainer.logger": ("wandb",)}
    config = configured({**name, "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B"})
    Tracker(tmp_path, config, recipe="grpo").close("finished")
    assert given["group"] == "lab" and given["name"] == "lab-seed7"
    assert given["tags"] == ["grpo", "lab", "Qwen2.5-0.5B"]


@pytest.mark.parametrize(
    "name, seed, group",
    [
        ("lab-seed1", 1, "lab"),
        ("seed1-lab", 1, "lab"),
        ("lab-seed1-cispo", 1, "lab-cispo"),
        ("lab-seed12", 1, "lab-seed12"),  # another number that begins alike
        ("lab", 1, "lab"),
        ("seed3", 3, "seeds"),
    ],
)
def test_a_group_is_the_experiment_without_its_seed(tmp_path, name, seed, group):
    config = configured({"trainer.experiment_name": name, "trainer.seed": seed})
    assert LoggedRun(config, tmp_path, "id", None).group == group


def mlflow_runs(uri: str, project: str):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return client, client.search_runs([client.get_experiment_by_name(project).experiment_id])


def test_mlflow_keeps_values_and_settings_and_a_resumed_run_goes_on_as_the_same(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow-skinny is an optional extra: pip install '.[mlflow]'")
    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = with_trainer(logger=("mlflow",), log_val_generations=2, project_name="p", experiment_name="run-seed1")
    tracker = Tracker(tmp_path / "run", config, recipe="grpo")
    for step in (1, 2):
        tracker.log(metrics_of(step, **{"val-core/lab/hops/acc/mean@2": 0.1 * step}))
    tracker.log_samples(2, sample_rows(2))
    tracker.close("failed")
    client, (run,) = mlflow_runs(uri, "p")
    assert (run.info.status, run.info.run_name) == ("FAILED", "run-seed1")
    assert run.data.params["trainer.experiment_name"] == "run-seed1" and len(run.data.params) == len(convert.all_keys())
    assert (run.data.tags["group"], run.data.tags["recipe"]) == ("run", "grpo")
    tracker = Tracker(tmp_path / "run", config, resume_step=1)
    tracker.log(metrics_of(2, **{"val-core/lab/hops/acc/mean@2": 0.5}))
    tracker.close("finished")
    client, (run,) = mlflow_runs(uri, "p")
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "val-core/lab/hops/acc/mean_at_2")
    assert sorted((each.step, each.value) for each in history) == [(1, 0.1), (2, 0.2), (2, 0.5)]
    assert [each.path for each in client.list_artifacts(run.info.run_id, "generations")] == ["generations/2.jsonl"]


def test_mlflow_writes_into_the_run_folder_where_no_server_is_named(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow-skinny is an optional extra: pip install '.[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Tracker(tmp_path / "run", with_trainer(logger=("mlflow",), project_name="p")).close("finished")
    assert len(mlflow_runs((tmp_path / "run" / "mlruns").as_uri(), "p")[1]) == 1


OWN_LOGGER = """
import json


class Lines:
    fails = ()

    def __init__(self, run):
        self.path, self.tags = run.run_dir / "own.jsonl", run.tags

    def write(self, what):
        if what in self.fails:
            raise ConnectionError("no route to host")
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\\n")

    def log(self, step, values):
        self.write(step)

    def samples(self, step, rows):
        self.write(f"samples {step}")

    def close(self, failed):
        self.write("failed" if failed else "closed")


class Away(Lines):
    fails = (2, 3, 4)


class Flickers(Lines):
    fails = (1, 2, 4, 5, "closed")


class Absent(Lines):
    def __init__(self, run):
        raise ConnectionError("no route to host")
"""


def own(tmp_path, name: str, resume_step=None, **changes) -> Tracker:
    path = tmp_path / "own_logger.py"
    path.write_text(OWN_LOGGER)
    return Tracker(tmp_path / "run", with_trainer(logger=(f"{path}:{name}",), **changes), resume_step=resume_step)


def logged(tmp_path) -> list:
    return [json.loads(line) for line in (tmp_path / "run" / "own.jsonl").read_text().splitlines()]


def test_a_logger_of_ones_own_is_named_by_its_path(tmp_path):
    tracker = own(tmp_path, "Lines", log_val_generations=1)
    tracker.log(metrics_of(1))
    tracker.log_samples(1, sample_rows(1))
    tracker.close("finished")
    assert logged(tmp_path) == [1, "samples 1", "closed"]
    composed = examine("grpo", ["trainer.logger=[console,my_pkg.my_logger:MyLogger]"])
    assert composed.problems == () and composed.config.trainer.logger == ("console", "my_pkg.my_logger:MyLogger")
    with pytest.raises(InputError, match="trainer.logger=nowhere.at_all:X: no module 'nowhere'"):
        Tracker(tmp_path / "other", with_trainer(logger=("nowhere.at_all:X",)))


def test_a_dry_run_looks_for_the_file_of_a_logger(tmp_path):
    config = compose("grpo", [f"trainer.logger=['{tmp_path}/absent.py:Lines']"])
    assert [problem.key for problem in paths.missing(config, frozenset({"trainer.logger"}))] == ["trainer.logger"]
    assert "function: trainer.logger can be loaded and called" in paths.checked_at_start(config)


def test_a_failing_logger_costs_no_line_of_metrics_and_is_switched_off(tmp_path, capsys):
    tracker = own(tmp_path, "Away")
    for step in range(1, 7):
        tracker.log(metrics_of(step))
    tracker.close("finished")
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert logged(tmp_path) == [1, "closed"]  # off after three failures in a row, and told that the run has ended
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3 and all("was not logged (ConnectionError: no route" in line for line in warnings)
    assert ["switched off" in line for line in warnings] == [False, False, True]
    (session,) = tracker.manifest["sessions"]
    assert list(session["logger_failures"].values()) == ["step 4: ConnectionError: no route to host"]
    assert tracker.manifest["status"] == "finished"
    assert json.loads((tmp_path / "run" / "manifest.json").read_text()) == tracker.manifest
    resumed = own(tmp_path, "Away", resume_step=6)
    resumed.log(metrics_of(7))
    resumed.close("finished")
    assert logged(tmp_path) == [1, "closed", 7, "closed"]  # resuming tries again


def test_a_logger_that_fails_now_and_then_stays(tmp_path, capsys):
    tracker = own(tmp_path, "Flickers")
    for step in range(1, 8):
        tracker.log(metrics_of(step))
    tracker.close("finished")
    assert logged(tmp_path) == [3, 6, 7] and tracker.manifest["status"] == "finished"
    assert "switched off" not in capsys.readouterr().err


def test_a_logger_that_cannot_begin_ends_a_new_run_and_not_a_resumed_one(tmp_path, capsys):
    with pytest.raises(InputError, match=r"Absent: could not begin \(ConnectionError: no route to host\); mend its"):
        own(tmp_path, "Absent")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"
    tracker = own(tmp_path, "Absent", resume_step=0)
    tracker.log(metrics_of(1))
    tracker.close("finished")
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
    assert "the resumed run goes on without it" in capsys.readouterr().err


# --- generations ---


def test_samples_are_kept_for_the_report_and_limited_for_the_loggers(tmp_path, capsys):
    rows = [{"input": f"q{i}", "output": "a", "gts": "b", "score": 0.0} for i in range(100)]
    tracker = Tracker(tmp_path, with_trainer(logger=("console",), log_val_generations=2))
    tracker.log_samples(5, rows)
    tracker.close("finished")
    kept = read_jsonl(tmp_path / "samples.jsonl")
    assert len(kept) == tracking.KEPT_SAMPLES and {row["step"] for row in kept} == {5}
    assert len({row["input"] for row in kept}) == tracking.KEPT_SAMPLES
    assert capsys.readouterr().out.count("step 5 sample") == 2


def test_spread_out_takes_from_everywhere():
    rows = [{"i": i} for i in range(10)]
    assert [row["i"] for row in spread_out(rows, 3)] == [0, 3, 6]
    assert spread_out(rows, 99) == rows and spread_out([], 3) == []


def test_dumps_have_verls_fields(tmp_path):
    prompt = Prompt(3, "gsm8k/3", (1, 2), (), "7", "openai/gsm8k")
    segments = (Segment("policy", "It is "), Segment("tool", "<r>"), Segment("policy", "7"))
    trajectory = Trajectory([1, 2], [3, 4], [True, True], [0.0, 0.0], segments, Stop.LENGTH, 0, 0)
    score = Score(0.5, {"acc": 1.0, "overlong": -0.5}, pred="7")
    tokenizer = SimpleNamespace(decode={(1, 2): "What?"}.get)
    (row,) = generation_rows(4, [ScoredGroup(prompt, (trajectory,), (score,))], tokenizer)
    dump_jsonl(tmp_path / "dumps", 4, [row])
    (read,) = read_jsonl(tmp_path / "dumps" / "4.jsonl")
    verl = {"input": "What?", "output": "It is <r>7", "gts": "7", "score": 0.5, "step": 4, "acc": 1.0}
    assert verl.items() <= read.items()
    assert read["overlong"] == -0.5 and read["uid"] == "gsm8k/3" and read["stop"] == "length"


# --- imports ---


def test_statistics_and_reports_import_nothing_heavy():
    code = (
        "import sys, results.reporting.run_report, core.tracking.tracker, core.tracking.validation\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'matplotlib', 'wandb', 'tensorboard', 'datasets'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ([], 1),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], 1),  # the trainer's own process holds the only learner
        (["trainer.backend=ray", "trainer.nnodes=2", "trainer.n_gpus_per_node=4"], 8),
        (["trainer.backend=ray", "trainer.device=cpu", "trainer.n_gpus_per_node=2"], 2),
    ],
)
def test_throughput_is_a_gpus_share_as_verl_counts_it(arguments, ranks):
    """verl's compute_throughout_metrics: total_num_tokens / (time * n_gpus)."""
    config = compose("grpo", arguments)
    assert config.learner_ranks == ranks
    metrics = StepMetrics(3)
    metrics.add({"timing_s/step": 20.0})
    answer = Trajectory([1] * 10, [2] * 5, [True] * 5, [0.0] * 5, (Segment("policy", "x"),), Stop.EOS, 2, 0)
    groups = [ScoredGroup(Prompt(0, 0, 0, (1,) * 10, "", {}), (answer,) * 4, (Score(1.0, {"score": 1.0}),) * 4)]
    fields = {"attention_mask": torch.ones(4, 15, dtype=torch.bool), "reward": torch.ones(4)}
    batch = batch_of_padded(**fields, response_mask=torch.arange(15).expand(4, -1) >= 10)
    metrics.add(data_metrics(groups, batch))
    assert progress_metrics(metrics, 0, config.learner_ranks)["perf/throughput"] == pytest.approx(60 / 20 / ranks)
