"""Run folders at a URL: what is there, in which order it arrives, and how a run goes on from there
elsewhere."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import fsspec
import pytest

from core.checkpoint.store import TRACKER, CheckpointStore, RemoteCopy, checkpoint_at
from core.errors import InputError, WriteFailed
from tests.core.scripted_run import configured, prepare, scripted
from tests.remote_places import fresh

URL = "memory://bucket/grpo/run"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return fs


def checkpoint(store: CheckpointStore, step: int, text: str = "weights") -> None:
    with store.writing(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "a.txt").write_text(f"{text} {step}")


def remote(folder: Path, *steps: int, keep: int | None = None) -> RemoteCopy:
    """A run folder that has sent these steps, opened as a start opens it."""
    run = RemoteCopy(URL, CheckpointStore(folder, keep=keep))
    run.open(writes=True)
    for step in steps:
        checkpoint(run.store, step)
        run.send(step)
    return run


def there(memory) -> set[str]:
    return {name.removeprefix("/bucket/grpo/run/") for name in memory.find("/bucket/grpo/run")}


def recorded(monkeypatch, refuse=lambda name: False) -> list[str]:
    """Record the names that are sent; the place refuses some."""
    sent, put = [], RemoteCopy.put

    def call(self, name, content):
        if refuse(name):
            raise WriteFailed(f"trainer.default_local_dir={self.url}: quota exceeded")
        sent.append(name)
        put(self, name, content)

    monkeypatch.setattr(RemoteCopy, "put", call)
    return sent


def test_the_manifest_is_sent_last_and_what_is_being_written_or_a_database_not_at_all(
    memory, tmp_path, monkeypatch
):
    sent = recorded(monkeypatch)
    kept_here = ("b.jsonl.partial", "judge/c.db", "judge/c.db-wal", "trace/step_3.partial/x")
    for name in ("a.jsonl", "trace/step_2/x", *kept_here):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("x")
    run = remote(tmp_path / "run", 2)
    ours = ["global_step_2/actor/a.txt", "global_step_2/manifest.json", TRACKER]
    assert sent == ["a.jsonl", "trace/step_2/x", *ours] and there(memory) == set(sent)
    assert memory.cat_file(f"/bucket/grpo/run/{TRACKER}") == b"2\n"
    (tmp_path / "run" / "a.jsonl").write_text("xx")
    run.send_files()
    assert sent[len(ours) + 2 :] == ["a.jsonl"], "what has changed"


def test_what_was_interrupted_is_not_complete_there(memory, tmp_path, monkeypatch):
    run = remote(tmp_path / "run", 2)
    checkpoint(run.store, 4)
    recorded(monkeypatch, lambda name: name == "global_step_4/manifest.json")
    with pytest.raises(WriteFailed):
        run.send(4)
    assert "global_step_4/actor/a.txt" in there(memory) and run.steps() == [2]
    assert remote(tmp_path / "other").store.latest().step == 2


def test_as_many_are_kept_there_as_here_and_a_newer_one_here_stays(memory, tmp_path, monkeypatch):
    run = remote(tmp_path / "run", 2, 4, 6, keep=2)
    assert run.steps() == [4, 6] and not [name for name in there(memory) if "global_step_2" in name]
    assert remote(tmp_path / "other", 8, keep=2).steps() == [6, 8]
    checkpoint(run.store, 10)
    again = remote(tmp_path / "run")
    assert again.store.latest().step == 10 and again.newest == 8
    monkeypatch.setattr(RemoteCopy, "files", lambda self: ["../escaped"])
    with pytest.raises(InputError, match="leads out of its folder"):
        remote(tmp_path / "run")


def test_a_damaged_one_there_is_an_error(memory, tmp_path):
    remote(tmp_path / "run", 2, 4)
    memory.pipe_file("/bucket/grpo/run/global_step_4/actor/a.txt", b"wEights 4")
    with pytest.raises(InputError, match="global_step_4: actor/a.txt was altered"):
        remote(tmp_path / "fresh").store.latest()


def test_another_run_at_the_url_is_noticed(memory, tmp_path):
    run = remote(tmp_path / "run", 2)
    remote(tmp_path / "other", 6)
    checkpoint(run.store, 4)
    with pytest.raises(InputError, match="global_step_6 there is of another run"):
        run.send(4)


def test_a_checkpoint_to_start_from_may_be_a_url(memory, tmp_path, monkeypatch):
    fresh(monkeypatch, tmp_path)
    remote(tmp_path / "run", 2)
    assert checkpoint_at(f"{URL}/global_step_2", "key").step == 2
    with pytest.raises(InputError, match=f"key={URL}: names no checkpoint"):
        checkpoint_at(URL, "key")


# --- whole runs ---


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("files"))


def trainer(files: Path, steps: int, *overrides: str):
    config = configured(
        files,
        "x",
        f"trainer.default_local_dir={URL}",
        "trainer.save_freq=2",
        *overrides,
        steps=steps,
    )
    return scripted()(config, lambda request, version: "12"[request.seed % 2])


@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_a_place_without_rights_is_one_line_before_models_load(
    key, files, memory, tmp_path, monkeypatch
):
    def denied(self, path, *args, **kwargs):
        if "/denied/" in path:
            raise PermissionError(13, "Access Denied")
        return write(self, path, *args, **kwargs)

    write = type(memory).pipe_file
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(memory), "pipe_file", denied)
    run = trainer(files, 2, f"trainer.{key}=memory://bucket/denied/x")
    monkeypatch.setattr(run, "make_workers", None)
    with pytest.raises(
        InputError, match=f"^trainer.{key}=memory://bucket/denied/x: cannot be written .Permission"
    ):
        run.init_workers()


def test_a_checkpoint_that_cannot_be_sent_is_complete_here_and_the_next_one_is_sent(
    files, memory, tmp_path, monkeypatch, caplog
):
    recorded(monkeypatch, lambda name: name.startswith("global_step_2/"))
    monkeypatch.chdir(tmp_path)
    run = trainer(files, 4).init_workers()
    run.fit()
    assert run.run.store.steps() == [2, 4] and run.run.remote.steps() == [4]
    assert "quota exceeded" in caplog.text and "Training goes on" in caplog.text
    with monkeypatch.context() as patch:  # the last one ends the run, and the next start sends it
        recorded(patch, lambda name: name.startswith("global_step_6/"))
        with pytest.raises(WriteFailed, match="quota exceeded"):
            trainer(files, 6).init_workers().fit()
    again = trainer(files, 8).init_workers()
    assert again.run.step == 6 and again.run.remote.steps() == [4, 6]


def test_a_run_goes_on_from_its_url_on_a_fresh_machine(files, memory, tmp_path, monkeypatch):
    dumps = f"trainer.rollout_data_dir={URL}-dump", f"trainer.validation_data_dir={URL}-val/"
    trained = []
    for machine, steps in (("one", 3), ("two", 6), ("whole", 6)):
        if machine == "whole":
            memory.store.clear()
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        run = trainer(
            files, steps, *dumps, "trainer.trace.freq=1", "trainer.test_freq=2"
        ).init_workers()
        assert run.run.step == {"one": 0, "two": 3, "whole": 0}[machine]
        run.fit()
        trained.append(run.trained)
        assert [path.name for path in Path().iterdir()] == ["outputs"], "no folder is named memory:"
    assert trained[0] + trained[1] == trained[2]
    assert {"metrics.jsonl", "manifest.json", "config.yaml", "trace/step_000001.json.gz"} <= there(
        memory
    )
    assert memory.cat_file("/bucket/grpo/run/metrics.jsonl").count(b"\n") == 6
    assert b'"status": "finished"' in memory.cat_file("/bucket/grpo/run/manifest.json")
    assert [
        len(memory.cat_file(f"/bucket/grpo/run-dump/{step}.jsonl").splitlines()) for step in (1, 2)
    ] == [8, 8]
    assert memory.exists("/bucket/grpo/run-val/2.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [("update", 4), ("remote_manifest", 2), ("remote_manifest", 4), ("checkpoint_tracker", 4)],
)
def test_a_killed_run_goes_on_from_its_url_with_the_folder_here_gone(moment, tmp_path):
    from tests.faults.killing import killed
    from tests.faults.tiny_run import command
    from tests.faults.tiny_run import prepare as prepare_files

    prepare_files(tmp_path / "files")
    factory = command(tmp_path / "files", "grpo", 4, "actor_rollout_ref.actor.use_kl_loss=False")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

    def start(machine: str, url: str, phase: str = "", step: int = 0) -> int:
        (tmp_path / machine).mkdir(exist_ok=True)
        command, extra = killed(factory(url), phase, step) if phase else (factory(url), {})
        done = subprocess.run(
            command, cwd=tmp_path / machine, env={**env, **extra}, capture_output=True, text=True
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    url = f"file://{tmp_path}/bucket/grpo/run"
    assert start("one", url, *moment) == -signal.SIGKILL
    shutil.rmtree(tmp_path / "one")
    assert start("two", url) == 0
    assert start("three", f"file://{tmp_path}/bucket/grpo/whole") == 0
    weights = [
        tmp_path / "bucket/grpo" / name / "global_step_4/actor/model.safetensors"
        for name in ("run", "whole")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
