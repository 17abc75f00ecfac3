"""Data and models behind URLs, as configuration, data, learner and manifest read them."""

import shutil
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from core import files as core_files
from core.checkpoint.provenance import base_of
from core.checkpoint.store import CheckpointStore
from core.config import compose, examine, paths
from core.config.sections.model import ModelConfig
from core.data.parquet import ExampleFile, sha256_of
from core.errors import InputError
from core.evaluate import request, weights_of
from core.export import main as export
from core.learner.models import load_policy, load_tokenizer, located, resolve_path
from core.tracking import run_manifest
from recipes.sft import demonstrations
from recipes.sft.config_schema import DemonstrationConfig
from results.publish import main as publish
from results.report import main as report
from results.trace import main as trace
from tests.core.files.places import fresh, put
from tests.core.scripted_run import configured, prepare, scripted
from tests.row_files import rows_file

ROOT = "memory://bucket"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("files"))


@pytest.fixture
def copies(monkeypatch, tmp_path):
    fsspec.filesystem("memory").store.clear()
    return fresh(monkeypatch, tmp_path)


def test_examples_of_a_url_are_those_of_the_file_and_name_the_url(tmp_path, copies):
    path = rows_file(tmp_path / "a.parquet", 5)
    url = put(Path(path), f"{ROOT}/a.parquet")
    there, here = ExampleFile(url), ExampleFile(path)
    assert there.example(3).prompt == here.example(3).prompt and there.example(3).where == f"{url} row 3"
    assert sha256_of(url) == sha256_of(path)


def test_a_file_that_is_not_parquet_is_named_by_its_url(tmp_path, copies):
    (tmp_path / "a.parquet").write_text("no")
    url = put(tmp_path / "a.parquet", f"{ROOT}/a.parquet")
    with pytest.raises(InputError, match=f"^{url}: not a readable parquet file"):
        ExampleFile(url)


def test_a_tokenizer_is_loaded_without_weights_and_a_model_with_them(files, copies):
    url = put(files / "model", f"{ROOT}/model")
    load_tokenizer(ModelConfig(path=url))
    assert not list(copies.rglob("*.safetensors"))
    there, here = (load_policy(ModelConfig(path=path)).state_dict() for path in (url, str(files / "model")))
    assert len(list(copies.rglob("*.safetensors"))) == 1
    assert all(torch.equal(there[name], here[name]) for name in here) and there.keys() == here.keys()


def test_a_base_is_named_by_its_url_and_known_by_its_weights(files, copies):
    url = put(files / "model", f"{ROOT}/model")
    assert located(url) == url and base_of(url).path == url
    assert base_of(url).sha256 == base_of(str(files / "model")).sha256


def test_a_url_without_a_model_is_one_line(tmp_path, copies):
    (tmp_path / "notes.txt").write_text("no model")
    url = put(tmp_path / "notes.txt", f"{ROOT}/model/notes.txt").removesuffix("/notes.txt")
    with pytest.raises(InputError, match=f"^critic.model.path={url}: no config.json there"):
        resolve_path(url, "critic.model.path")


def test_a_run_on_urls_is_the_run_on_paths(files, tmp_path, copies):
    rows = put(files / "train.parquet", f"{ROOT}/data/train.parquet")
    model = put(files / "model", f"{ROOT}/model")
    remote = (f"data.train_files={rows}", f"data.val_files={rows}", f"actor_rollout_ref.model.path={model}")
    trained, hashes = [], []
    for name, overrides in (("paths", ()), ("urls", remote)):
        config = configured(files, name, *overrides, f"trainer.default_local_dir={tmp_path / name}", steps=2)
        run = scripted()(config, lambda request, version: "12"[request.seed % 2]).init_workers()
        run.fit()
        trained.append(run.trained)
        hashes.append({key: value for key, value in run.run.contents.items() if key.startswith("data.")})
    assert trained[0] == trained[1] and hashes[0] == hashes[1] and hashes[0]["data.train_files"]
    manifest = run_manifest.data_hashes([rows])
    assert [entry["path"] for entry in manifest] == [rows] and manifest[0]["sha256"] == sha256_of(rows)


def test_a_run_on_paths_touches_no_driver(files, tmp_path, copies, monkeypatch):
    monkeypatch.setattr(core_files, "place", None)
    config = configured(files, "run", f"trainer.default_local_dir={tmp_path}", steps=1)
    assert paths.missing(config) == []
    scripted()(config, lambda request, version: "1").init_workers().fit()
    assert not copies.exists()


# --- what a start and a dry run say ---


def missing(*overrides: str, among=None) -> list[str]:
    config = compose("grpo", ["custom_reward_function.path=null", *overrides])
    return [str(problem) for problem in paths.missing(config, among)]


def test_a_url_that_is_not_there_is_found_before_a_start(files, copies):
    rows, model = put(files / "train.parquet", f"{ROOT}/a.parquet"), put(files / "model", f"{ROOT}/model")
    data = f"data.train_files={rows}", f"data.val_files=[{rows},{ROOT}/b.parquet]"
    found = missing(*data, f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={ROOT}/run")
    assert found == [
        f"data.val_files={ROOT}/b.parquet: does not exist; give another URL, or put it there first",
    ]
    assert not copies.exists()  # looked at, not copied


def test_a_dry_run_looks_for_drivers_alone(monkeypatch, copies):
    monkeypatch.setattr(core_files, "place", None)
    model = "actor_rollout_ref.model.path=gs://bucket/model"
    (line,) = missing(model, f"trainer.default_local_dir={ROOT}/run", among=frozenset())
    assert line.startswith("actor_rollout_ref.model.path=gs://bucket/model: the driver of gs:// is not installed; ")
    assert missing(f"actor_rollout_ref.model.path={ROOT}/nowhere", among=frozenset()) == []


@pytest.mark.parametrize("name", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_what_is_written_needs_its_driver_too(name):
    (line,) = missing(f"trainer.{name}=gs://b/run", among=frozenset())
    assert line.startswith(f"trainer.{name}=gs://b/run: the driver of gs:// is not installed; ")


def test_a_judges_replies_are_in_the_run_folder_here():
    judge = ["reward_model.enable=True", "reward_model.judge.url=http://x/v1", "reward_model.judge.model=m"]
    judge += ["reward_model.on_error=mask"]
    for folder, here in ((f"{ROOT}/a", "outputs/remote/memory/bucket/a"), ("./runs/a", "./runs/a")):
        config = compose("grpo", [*judge, f"trainer.default_local_dir={folder}"])
        assert config.reward_model.judge.cache_dir == f"{here}/judge"


def test_demonstrations_of_a_url_are_those_of_the_file(tmp_path, copies):
    rows = [{"prompt": "2+2?", "response": "4"}, {"prompt": "3+3?", "response": "6"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    url, keys = put(tmp_path / "a.parquet", f"{ROOT}/a.parquet"), DemonstrationConfig(response_key="response")
    assert demonstrations._read(url, keys).to_pylist() == rows
    with pytest.raises(InputError, match=f"data={ROOT}/b.parquet: does not exist"):
        demonstrations._read(f"{ROOT}/b.parquet", keys)


# --- commands ---


def test_a_checkpoint_at_a_url_is_exported_and_evaluated_and_a_run_is_not(files, tmp_path, copies, capsys):
    with CheckpointStore(tmp_path / "run").writing(2) as folder:
        shutil.copytree(files / "model", folder / "actor")
    url = put(tmp_path / "run", f"{ROOT}/grpo/run")
    assert export([f"{url}/global_step_2", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (files / "model/model.safetensors").read_bytes()
    assert export([url, str(tmp_path / "other")]) == 2
    assert f"{url}: names no checkpoint; give the URL of a global_step_N" in capsys.readouterr().err
    out = tmp_path / "a.jsonl"
    assert request("grpo", [], out, None, f"{url}/global_step_2").checkpoint.step == 2
    places = put(files / "model", f"{ROOT}/model"), str(files / "model")
    there, here = (request("grpo", [], out, path, None) for path in places)
    assert there.path == f"{ROOT}/model" and weights_of(there) == weights_of(here)


def test_a_run_at_a_url_is_reported_and_published_without_its_checkpoints(tmp_path, copies, capsys):
    run = Path(__file__).resolve().parents[3] / "results" / "grpo" / "lab-seed1"
    url = put(run, f"{ROOT}/grpo/lab-seed1")
    fsspec.filesystem("memory").pipe_file("/bucket/grpo/lab-seed1/global_step_2/model", b"large")
    assert report([url, "--out", str(tmp_path / "report")]) == 0 and (tmp_path / "report" / "report.md").exists()
    assert not list(copies.rglob("global_step_2"))
    assert publish([url, "--as", "grpo/again", "--results", str(tmp_path)]) == 0
    assert (tmp_path / "grpo" / "again" / "metrics.csv").exists()
    assert trace([url]) == 2 and "no step is recorded" in capsys.readouterr().err


def test_the_output_of_a_command_is_a_path(capsys):
    with pytest.raises(SystemExit):
        export(["run", "s3://bucket/out"])
    assert "s3://bucket/out: this is written to this machine alone; give a path" in capsys.readouterr().err
    assert core_files.written_here("a/b") == Path("a/b")


def test_a_protocol_in_capitals_is_no_folder(monkeypatch):
    (line,) = missing("trainer.default_local_dir=S3://b/run", among=frozenset())
    assert line.startswith("trainer.default_local_dir=S3://b/run: no driver for S3:// is known; use file://")


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "critic.model.path"]
)
def test_a_url_is_a_model(key):
    assert not examine("ppo", [f"{key}={ROOT}/org/model"]).problems


@pytest.mark.parametrize(
    "key",
    [
        "custom_reward_function.path",
        *(f"actor_rollout_ref.rollout.multi_turn.{name}_config_path" for name in ("tool", "interaction")),
    ],
)
def test_code_and_tools_are_read_here_alone(key):
    lines = [line for line in missing(f"{key}={ROOT}/x.py", among=frozenset({key})) if line.startswith(key)]
    assert lines == [f"{key}={ROOT}/x.py: is read from this machine alone; copy the file here and give its path"]
