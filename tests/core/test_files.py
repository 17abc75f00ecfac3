"""Files: names that lead elsewhere, what a download left out, and URLs: in memory, in a folder and
on an S3 server."""

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from core import files
from core.checkpoint.provenance import base_of
from core.checkpoint.store import CheckpointStore, RemoteCopy
from core.config import paths
from core.config.composition import compose
from core.data.parquet import ExampleFile
from core.errors import InputError
from core.evaluate import request
from core.export import main as export
from core.files import file_sha256, inside, local_path, replacing
from core.learner.models import WEIGHT_FILES, load_tokenizer
from results.report import main as report
from tests import remote_places
from tests.core.scripted_run import prepare
from tests.remote_places import fresh, put

MEMORY = "memory://bucket"
ROOT = Path(__file__).resolve().parents[2]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError), replacing(tmp_path / "a") as partial:
        partial.write_text("half")
        raise OSError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (
        tmp_path / "a"
    ).read_text() == "old"


@pytest.mark.parametrize("name", ["actor/../../x", "../x", "..", "/tmp/x", "link/x"])
def test_a_name_that_leads_out_of_its_folder_is_refused(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="MANIFEST: the file name .* leads out of its folder"):
        inside(tmp_path / "folder", name, "MANIFEST")
    for ordinary in ("a/b.json", "..a", "a..b/.c", "é/中", "~x"):  # the folder itself may be a link
        assert (
            inside(tmp_path / "folder" / "link", ordinary, "")
            == tmp_path / "folder" / "link" / ordinary
        )


@pytest.fixture
def model(tmp_path):
    """A folder with the files of a model, in no shape that could be loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    save_file(
        {"a": np.zeros((30, 4), np.float32), "b": np.ones(7, np.float32)},
        folder / "model.safetensors",
    )
    return folder


# ---------------------------------------------------------------- URLs


@pytest.fixture
def copies(monkeypatch, tmp_path):
    fsspec.filesystem("memory").store.clear()
    return fresh(monkeypatch, tmp_path)


@pytest.fixture(params=["memory", "file"])
def root(request, tmp_path, copies):
    return MEMORY if request.param == "memory" else f"file://{tmp_path}/there"


def contents(folder) -> dict[str, bytes]:
    folder = Path(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_is_copied_once_and_anew_where_it_has_changed(root, model, copies):
    (model / "part").mkdir()
    (model / "part" / "more.txt").write_text("more")
    url = put(model, f"{root}/org/model")
    found = local_path(url)
    assert Path(found).name == "model" and contents(found) == contents(model)
    times = {path: path.stat().st_mtime_ns for path in Path(found).rglob("*")}
    files._copied.cache_clear()  # as in another process
    assert local_path(url) == local_path(f"{url}/") == found
    assert {path: path.stat().st_mtime_ns for path in Path(found).rglob("*")} == times
    assert contents(local_path(url, without=WEIGHT_FILES)).keys() == contents(model).keys() - {
        "model.safetensors"
    }
    put(model, url)
    (model / "config.json").write_text("{ }")
    put(model, url)
    assert local_path(url) == found, "all of one process is of one state"
    files._copied.cache_clear()
    assert contents(local_path(url)) == contents(model)
    file = local_path(f"{url}/config.json")
    assert Path(file).name == "config.json" and Path(file).read_text() == "{ }"


def test_an_interrupted_copy_is_made_again(model, copies, monkeypatch):
    url, memory = put(model, f"{MEMORY}/model"), type(fsspec.filesystem("memory"))
    get_file = memory.get_file

    def breaks(self, path, into, **options):
        get_file(self, path, into, **options)
        if into.endswith("model.safetensors"):
            raise ConnectionError("reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "get_file", breaks)
        with pytest.raises(
            InputError, match=f"model.path={url}: cannot be read .ConnectionError: reset"
        ):
            local_path(url, "model.path")
    assert contents(local_path(url, "model.path")) == contents(model)


def test_another_process_that_copies_is_waited_for(model, tmp_path, copies):
    url = put(model, f"file://{tmp_path}/there")
    found = Path(local_path(url))
    shutil.rmtree(found.parent)
    program = (
        f"from core.files import local_path; print('begun', flush=True); print(local_path({url!r}))"
    )
    with open(found.parent.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        assert not found.exists()
    assert other.communicate(timeout=60)[0].strip() == str(found) and found.exists()


def test_what_cannot_be_read_at_a_url_is_one_line(copies, monkeypatch):
    for url, rule in (
        (f"{MEMORY}/absent", "FileNotFoundError"),
        ("nosuch://x/y", ".*nosuch"),
        ("gs://bucket/x", "ImportError: .*gcsfs"),
    ):
        with pytest.raises(InputError, match=f"key={url}: cannot be read .{rule}") as caught:
            local_path(url, "key")
        assert "\n" not in str(caught.value) and not copies.exists()
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/model/a", b"")
    monkeypatch.setattr(
        type(memory), "find", lambda *_, **__: {"/bucket/model/../../evil": {"size": 1}}
    )
    with pytest.raises(InputError, match="leads out of its folder"):
        local_path(f"{MEMORY}/model")


def test_a_start_looks_up_urls_and_a_dry_run_their_drivers_alone(model, copies):
    def missing(*overrides: str, among=None) -> list[str]:
        config = compose("grpo", ["custom_reward_function.path=null", *overrides])
        return [str(problem).partition(" (")[0] for problem in paths.missing(config, among)]

    model_path = f"actor_rollout_ref.model.path={put(model, f'{MEMORY}/model')}"
    rows = f"data.train_files={MEMORY}/model/config.json", f"data.val_files={MEMORY}/b.parquet"
    assert missing(*rows, model_path) == [f"{rows[1]}: cannot be read"] and not copies.exists()
    assert missing(rows[1], model_path, among=frozenset()) == []
    gs = "data.train_files=gs://b/a.parquet"
    assert missing(gs, among=frozenset()) == [f"{gs}: cannot be read"]


def test_examples_tokenizers_and_bases_of_a_url_are_those_of_the_files(tmp_path, copies):
    made = prepare(tmp_path / "files")
    rows, url = (
        put(made / "train.parquet", f"{MEMORY}/a.parquet"),
        put(made / "model", f"{MEMORY}/model"),
    )
    there, here = ExampleFile(rows), ExampleFile(str(made / "train.parquet"))
    assert (
        there.example(3).prompt == here.example(3).prompt
        and there.example(3).where == f"{rows} row 3"
    )
    assert file_sha256(Path(local_path(rows))) == file_sha256(made / "train.parquet")
    load_tokenizer(compose("grpo", [f"actor_rollout_ref.model.path={url}"]).actor_rollout_ref.model)
    assert not list(copies.rglob("*.safetensors")), "a tokenizer needs no weights"
    assert base_of(url) == base_of(str(made / "model"))


def test_commands_take_urls_of_checkpoints_and_runs(model, tmp_path, copies, capsys):
    with CheckpointStore(tmp_path / "run").writing(2) as folder:
        shutil.copytree(model, folder / "actor")
    url = put(tmp_path / "run", f"{MEMORY}/grpo/run")
    assert export([f"{url}/global_step_2", str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(model)
    assert (
        export([url, str(tmp_path / "other")]) == 2
        and f"{url}: names no checkpoint" in capsys.readouterr().err
    )
    assert (
        request("grpo", [], tmp_path / "a.jsonl", None, f"{url}/global_step_2").checkpoint.step == 2
    )
    run = put(ROOT / "results" / "grpo" / "lab-seed1", f"{MEMORY}/grpo/lab-seed1")
    fsspec.filesystem("memory").pipe_file("/bucket/grpo/lab-seed1/global_step_2/model", b"large")
    assert (
        report([run, "--out", str(tmp_path / "report")]) == 0
        and (tmp_path / "report" / "report.md").exists()
    )
    assert not list(copies.rglob("lab-seed1/global_step_2"))


# ---------------------------------------------------------------- a real S3 server

BUCKET = "s3://bucket"


@pytest.fixture
def s3(monkeypatch):
    with remote_places.s3_server() as reached:
        for name, value in reached.items():
            monkeypatch.setenv(name, value)
        driver = fsspec.get_filesystem_class("s3")
        # Which reads login and address from the environment once and keeps both
        driver.clear_instance_cache()
        fsspec.filesystem("s3").mkdir("bucket")
        yield
    driver.clear_instance_cache()


@pytest.mark.slow
def test_a_run_folder_on_s3_is_gone_on_with_on_another_machine(s3, tmp_path, copies, monkeypatch):
    made = prepare(tmp_path / "files")
    model, rows = (put(made / name, f"{BUCKET}/{name}") for name in ("model", "train.parquet"))
    assert contents(local_path(model)) == contents(made / "model")
    assert (
        file_sha256(Path(local_path(rows))) == file_sha256(made / "train.parquet")
        and ExampleFile(rows).example(3).prompt
    )

    def run_on(machine: str, *steps: int) -> RemoteCopy:
        run = RemoteCopy(f"{BUCKET}/grpo/run", CheckpointStore(tmp_path / machine, keep=2))
        run.open(writes=True)
        for step in steps:
            with run.store.writing(step) as folder:
                (folder / "weights").write_text(str(step))
            run.send(step)
        return run

    def end(self, name, content):
        if name == "global_step_4/manifest.json":
            raise KeyboardInterrupt
        put_file(self, name, content)

    put_file = RemoteCopy.put
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RemoteCopy, "put", end)
        run_on("one", 2, 4)
    there = set(fsspec.filesystem("s3").find("bucket/grpo/run"))
    assert (
        "bucket/grpo/run/global_step_4/weights" in there
        and "global_step_4/manifest.json" not in str(there)
    )
    two = run_on("two")
    assert two.store.latest().step == 2
    assert run_on("two", 4, 6).steps() == [4, 6] == run_on("three").steps()
