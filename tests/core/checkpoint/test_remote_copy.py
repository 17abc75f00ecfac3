"""Run folders at a URL: what is there, in which order it arrives, and how a run goes on from there elsewhere."""

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import fsspec
import pytest

from core import files as core_files
from core.checkpoint.remote_copy import RemoteCopy
from core.checkpoint.store import TRACKER, CheckpointStore
from core.config import compose, paths
from core.errors import InputError, WriteFailed
from tests.core.files.places import fresh
from tests.core.scripted_run import configured, prepare, scripted

URL = "memory://bucket/grpo/run"


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(core_files, "PAUSES_S", (0.0, 0.0))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return fs


def checkpoint(store: CheckpointStore, step: int, text: str = "weights") -> None:
    with store.writing(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "a.txt").write_text(f"{text} {step}")


def remote(folder: Path, *steps: int, keep: int | None = None) -> RemoteCopy:
    """A run folder that has written these steps through."""
    run = RemoteCopy(URL, CheckpointStore(folder, keep=keep))
    for step in steps:
        checkpoint(run.store, step)
        run.send(step)
    return run


def there(memory) -> set[str]:
    return {name.removeprefix("/bucket/grpo/run/") for name in memory.find("/bucket/grpo/run")}


def test_the_manifest_is_sent_last(memory, tmp_path, monkeypatch):
    sent, put = [], RemoteCopy._put
    monkeypatch.setattr(RemoteCopy, "_put", lambda self, file, to: (sent.append(to), put(self, file, to)))
    remote(tmp_path / "run", 2)
    assert sent[-1].endswith("global_step_2/manifest.json")
    assert (
        not [name for name in sent if name.endswith(TRACKER)]
        and memory.cat_file(f"/bucket/grpo/run/{TRACKER}") == b"2\n"
    )
    assert {"global_step_2/actor/a.txt", "global_step_2/manifest.json"} <= there(memory)
    assert not [name for name in there(memory) if name.startswith((".", "damaged"))]


def test_what_was_interrupted_is_not_complete_there(memory, tmp_path, monkeypatch):
    run = remote(tmp_path / "run", 2)
    checkpoint(run.store, 4)

    def breaks(self, file, target):
        if target.endswith("manifest.json") and "global_step" in target:
            raise ConnectionError("reset by peer")
        memory.put_file(str(file), target)

    monkeypatch.setattr(RemoteCopy, "_put", breaks)
    with pytest.raises(InputError, match=f"trainer.default_local_dir={URL}: cannot be written .ConnectionError: reset"):
        run.send(4)
    assert "global_step_4/actor/a.txt" in there(memory) and run.steps() == [2]
    fresh = RemoteCopy(URL, CheckpointStore(tmp_path / "other"))
    fresh.open(writes=True)
    assert fresh.store.latest().step == 2


def test_a_place_that_fails_twice_is_tried_again(memory, tmp_path, monkeypatch):
    left, put = [1, 1], RemoteCopy._put

    def fails_twice(self, file, target):
        if left:
            left.pop()
            raise TimeoutError("slow")
        put(self, file, target)

    monkeypatch.setattr(RemoteCopy, "_put", fails_twice)
    assert remote(tmp_path / "run", 2).steps() == [2]


def test_as_many_are_kept_there_as_here(memory, tmp_path):
    run = remote(tmp_path / "run", 2, 4, 6, keep=2)
    assert run.steps() == [4, 6] and not [name for name in there(memory) if "global_step_2" in name]
    other = RemoteCopy(URL, CheckpointStore(tmp_path / "other", keep=2))
    other.open(writes=True)
    checkpoint(other.store, 8)
    other.send(8)
    assert other.steps() == [6, 8]


def test_a_damaged_one_there_is_skipped_and_all_damaged_are_an_error(memory, tmp_path):
    remote(tmp_path / "run", 2, 4)
    memory.pipe_file("/bucket/grpo/run/global_step_4/actor/a.txt", b"wEights 4")
    fresh = RemoteCopy(URL, CheckpointStore(tmp_path / "fresh"))
    fresh.open(writes=True)
    assert fresh.store.latest().step == 2
    memory.pipe_file("/bucket/grpo/run/global_step_2/actor/a.txt", b"wEights 2")
    with pytest.raises(InputError, match="every checkpoint there is damaged"):
        RemoteCopy(URL, CheckpointStore(tmp_path / "again")).open(writes=True)


def test_a_newer_one_here_is_kept(memory, tmp_path):
    run = remote(tmp_path / "run", 2)
    checkpoint(run.store, 4)
    again = RemoteCopy(URL, CheckpointStore(tmp_path / "run"))
    again.open(writes=True)
    assert again.store.latest().step == 4 and again.newest == 2


def test_another_run_at_the_url_is_noticed(memory, tmp_path):
    run = remote(tmp_path / "run", 2)
    other = RemoteCopy(URL, CheckpointStore(tmp_path / "other"))
    other.open(writes=True)
    checkpoint(other.store, 6)
    other.send(6)
    checkpoint(run.store, 4)
    with pytest.raises(InputError, match="global_step_6 there is of another run"):
        run.send(4)


def test_a_place_without_rights_to_write_is_one_line_before_models_load(memory, tmp_path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Access Denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(memory), "pipe_file", denied)
    run = trainer(prepare(tmp_path / "files"), 2)
    monkeypatch.setattr(run, "make_workers", None)
    with pytest.raises(InputError, match=f"^trainer.default_local_dir={URL}: no rights to write there"):
        run.init_workers()


def test_the_folder_here_follows_from_the_url():
    config = compose("grpo", ["trainer.default_local_dir=s3://bucket/../runs/a"])
    assert paths.run_folder(config) == Path("outputs/remote/s3/bucket/runs/a")


def test_a_checkpoint_to_start_from_may_be_a_url(memory, tmp_path, monkeypatch):
    fresh(monkeypatch, tmp_path)
    remote(tmp_path / "run", 2)
    store = CheckpointStore(tmp_path / "other")
    assert store.at(f"{URL}/global_step_2").step == 2
    with pytest.raises(InputError, match=f"trainer.resume_from_path={URL}: names no checkpoint"):
        store.at(URL)


def test_what_is_still_being_written_and_a_database_are_not_sent(memory, tmp_path):
    run = RemoteCopy(URL, CheckpointStore(tmp_path / "run"))
    for name in (
        "a.jsonl",
        "b.jsonl.partial",
        "judge/cache.db",
        "judge/cache.db-wal",
        "trace/step_2/x",
        "trace/step_3.partial/x",
        "trace/step_4.old/x",
    ):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("x")
    run.send_files()
    assert there(memory) == {"a.jsonl", "trace/step_2/x"}


# --- whole runs ---


def trainer(files: Path, steps: int, *overrides: str):
    config = configured(files, "x", f"trainer.default_local_dir={URL}", "trainer.save_freq=2", *overrides, steps=steps)
    return scripted()(config, lambda request, version: "12"[request.seed % 2])


def test_steps_go_on_while_a_checkpoint_is_sent_and_its_manifest_is_last(memory, tmp_path, monkeypatch):
    trained, order, put = [threading.Event() for _ in range(6)], [], RemoteCopy._put

    def slow(self, file, target):
        if "global_step_2/" in target:
            assert trained[3].wait(30), "the next step waited until a checkpoint was sent"
        order.append(target.removeprefix("/bucket/grpo/run/"))
        put(self, file, target)

    monkeypatch.setattr(RemoteCopy, "_put", slow)
    monkeypatch.chdir(tmp_path)
    run = trainer(prepare(tmp_path / "files"), 4).init_workers()
    complete = run.complete_step
    monkeypatch.setattr(
        run,
        "complete_step",
        lambda groups, batch, metrics: (trained[metrics.step].set(), complete(groups, batch, metrics)),
    )
    run.fit()
    for step in (2, 4):
        of_step = [name for name in order if name.startswith(f"global_step_{step}/")]
        assert of_step[-1] == f"global_step_{step}/manifest.json" and len(of_step) > 2
    assert order.index("global_step_2/manifest.json") < order.index("global_step_4/driver.pt")


def full_at(monkeypatch, *steps: int) -> None:
    def full(self, file, target):
        if any(f"global_step_{step}/" in target for step in steps):
            raise OSError("quota exceeded")
        put(self, file, target)

    put = RemoteCopy._put
    monkeypatch.setattr(RemoteCopy, "_put", full)


def test_a_checkpoint_that_cannot_be_sent_is_complete_here_and_the_next_one_is_sent(
    memory, tmp_path, monkeypatch, caplog
):
    full_at(monkeypatch, 2)
    monkeypatch.chdir(tmp_path)
    run = trainer(prepare(tmp_path / "files"), 4).init_workers()
    run.fit()
    assert run.run.store.steps() == [2, 4] and run.run.remote.steps() == [4]
    assert f"trainer.default_local_dir={URL}: cannot be written (OSError: quota exceeded" in caplog.text
    assert "Training goes on, and the next checkpoint is another try" in caplog.text


def test_a_last_checkpoint_that_cannot_be_sent_ends_the_run_and_is_complete_here(memory, tmp_path, monkeypatch):
    put = RemoteCopy._put
    full_at(monkeypatch, 2)
    monkeypatch.chdir(tmp_path)
    files = prepare(tmp_path / "files")
    run = trainer(files, 2).init_workers()
    with pytest.raises(
        WriteFailed, match=f"^trainer.default_local_dir={URL}: cannot be written .OSError: quota exceeded"
    ):
        run.fit()
    assert run.run.store.latest().step == 2 and not run.run.remote.steps()
    monkeypatch.setattr(RemoteCopy, "_put", put)
    again = trainer(files, 4).init_workers()
    assert again.run.step == 2 and again.run.remote.steps() == [2]


def test_answers_and_recorded_tokens_reach_urls(memory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dumps = f"trainer.rollout_data_dir={URL}-dump", f"trainer.validation_data_dir={URL}-val/"
    trainer(prepare(tmp_path / "files"), 2, *dumps, "trainer.trace.freq=1", "trainer.test_freq=2").init_workers().fit()
    assert {"trace/step_000001.npz", "trace/step_000002.npz"} <= there(memory)
    assert [len(memory.cat_file(f"/bucket/grpo/run-dump/{step}.jsonl").splitlines()) for step in (1, 2)] == [8, 8]
    assert memory.ls("/bucket/grpo/run-val", detail=False) == ["/bucket/grpo/run-val/2.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "outputs"]  # no folder is named memory:


@pytest.mark.parametrize("name", ["rollout_data_dir", "validation_data_dir"])
def test_a_folder_of_answers_without_rights_is_one_line_before_models_load(name, memory, tmp_path, monkeypatch):
    write = type(memory).pipe_file

    def denied(self, path, *args, **kwargs):
        if "/answers/" in path:
            raise PermissionError(13, "Access Denied")
        return write(self, path, *args, **kwargs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(memory), "pipe_file", denied)
    run = trainer(prepare(tmp_path / "files"), 2, f"trainer.{name}=memory://bucket/answers")
    monkeypatch.setattr(run, "make_workers", None)
    with pytest.raises(InputError, match=f"^trainer.{name}=memory://bucket/answers: no rights to write there"):
        run.init_workers()


def test_a_run_goes_on_from_its_url_on_a_fresh_machine(memory, tmp_path, monkeypatch):
    files = prepare(tmp_path / "files")
    trained = []
    for machine, steps in (("one", 3), ("two", 6)):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        run = trainer(files, steps).init_workers()
        assert run.run.step == {"one": 0, "two": 3}[machine]
        run.fit()
        trained += run.trained
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    memory.store.clear()
    whole = trainer(files, 6).init_workers()
    whole.fit()
    assert trained == whole.trained
    lines = [name for name in there(memory) if "/" not in name]
    assert {"metrics.jsonl", "manifest.json", "config.yaml"} <= {*lines}
    assert memory.cat_file("/bucket/grpo/run/metrics.jsonl").count(b"\n") == 6
    assert b'"status": "finished"' in memory.cat_file("/bucket/grpo/run/manifest.json")


def test_what_was_not_sent_before_a_kill_is_sent_by_the_next_start(memory, tmp_path, monkeypatch):
    files = prepare(tmp_path / "files")
    monkeypatch.chdir(tmp_path)
    trainer(files, 4).init_workers().fit()
    memory.rm_file("/bucket/grpo/run/global_step_4/manifest.json")
    (tmp_path / "outputs/remote/memory/bucket/grpo/run" / TRACKER).unlink()  # as after a kill before it was written
    trainer(files, 4).init_workers()
    assert memory.exists("/bucket/grpo/run/global_step_4/manifest.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [("update", 4), ("remote_manifest", 2), ("remote_manifest", 4), ("checkpoint_tracker", 4)]
)
def test_a_killed_run_goes_on_from_its_url_with_the_folder_here_gone(moment, tmp_path):
    from tests.faults.killing import killed
    from tests.faults.tiny_run import command
    from tests.faults.tiny_run import prepare as prepare_files

    prepare_files(tmp_path / "files")
    factory = command(tmp_path / "files", "grpo", 4, "actor_rollout_ref.actor.use_kl_loss=False")
    root, env = Path(__file__).resolve().parents[3], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = str(root)

    def start(machine: str, url: str, phase: str = "", step: int = 0) -> int:
        (tmp_path / machine).mkdir(exist_ok=True)
        command, extra = killed(factory(url), phase, step) if phase else (factory(url), {})
        done = subprocess.run(command, cwd=tmp_path / machine, env={**env, **extra}, capture_output=True, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    url = f"file://{tmp_path}/bucket/grpo/run"
    assert start("one", url, *moment) == -signal.SIGKILL
    shutil.rmtree(tmp_path / "one")
    assert start("two", url) == 0
    assert start("three", f"file://{tmp_path}/bucket/grpo/whole") == 0
    weights = [tmp_path / "bucket/grpo" / name / "global_step_4/actor/model.safetensors" for name in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_a_run_over_ray_reads_from_urls_and_writes_to_them(tmp_path):
    pytest.importorskip("ray")
    from tests.faults.tiny_run import command
    from tests.faults.tiny_run import prepare as prepare_files

    prepare_files(tmp_path / "files")
    at = f"file://{tmp_path}"
    urls = [f"data.train_files={at}/files/train.parquet", f"actor_rollout_ref.model.path={at}/files/model"]
    urls += [f"trainer.rollout_data_dir={at}/dump", "trainer.trace.freq=1", "trainer.backend=ray"]
    start = command(tmp_path / "files", "grpo", 2, "actor_rollout_ref.actor.use_kl_loss=False", *urls)
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root), "RLREPRO_CACHE": str(tmp_path / "cache")}
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        start(f"{at}/bucket/grpo/run"), cwd=tmp_path / "here", env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    run = CheckpointStore(tmp_path / "bucket" / "grpo" / "run")
    assert run.latest().step == 2 and (run.root / "trace" / "step_000001.npz").exists()
    assert {path.name for path in (tmp_path / "dump").iterdir()} == {"1.jsonl", "2.jsonl"}
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"outputs"}
