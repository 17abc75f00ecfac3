"""Checkpoints are written beside training: what goes on meanwhile, what a failure ends, and what is on disk when."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest

from core.checkpoint.run_state import DriverState
from core.checkpoint.store import BackgroundWriter, CheckpointStore
from core.command_line import train
from core.errors import WriteFailed
from core.run import Run
from tests.core import scripted_run
from tests.core.scripted_run import ScriptedSnapshot, configured, prepare, scripted

WAIT_S = 30


def respond(request, version):
    return str(request.seed % 5)


def start(folder: Path, *overrides: str):
    if not (folder / "model").exists():
        prepare(folder)
    return scripted()(configured(folder, "run", "trainer.save_freq=1", *overrides), respond).init_workers()


class Writes:
    """Takes the place of what a snapshot writes; ``order`` has what happened, in order."""

    def __init__(self, monkeypatch):
        self.order: list[str] = []
        self.steps = {step: threading.Event() for step in range(10)}
        complete, write = Run.complete, ScriptedSnapshot.write

        def completed(run, metrics, *rest):
            self.order.append(f"step {metrics.step}")
            self.steps[metrics.step].set()
            complete(run, metrics, *rest)

        def written(snapshot, folder):
            self.before(snapshot.version)
            self.order.append(f"wrote {snapshot.version}")
            return write(snapshot, folder)

        monkeypatch.setattr(Run, "complete", completed)
        monkeypatch.setattr(scripted_run.ScriptedSnapshot, "write", written)

    def before(self, version: int) -> None:
        """Wait for the step after, unless it is the last: without one thread for both this never ends."""
        if version < 3:
            assert self.steps[version + 1].wait(WAIT_S), "the next step waited for the checkpoint"


def test_a_checkpoint_is_written_while_the_next_step_runs(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    run = start(tmp_path, "trainer.total_training_steps=3", "trainer.save_freq=2")
    run.fit()
    assert writes.order == ["step 1", "step 2", "step 3", "wrote 2", "wrote 3"]
    assert run.run.saved_step == 3 and CheckpointStore(run.run.run_dir).steps() == [2, 3]
    stored = json.loads((run.run.store.folder(2) / "actor" / "version.json").read_text())
    assert stored == 2, "what is written is the state of its step"
    assert DriverState.load(run.run.store.folder(2)).step == 2


def test_one_checkpoint_is_complete_before_the_next_begins(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Writes, "before", lambda self, version: None)
    Writes(monkeypatch)
    run = start(tmp_path, "trainer.total_training_steps=4")
    snapshot = run.workers.snapshot
    monkeypatch.setattr(run.workers, "snapshot", lambda: seen.append(run.run.store.steps()) or snapshot())
    run.fit()
    assert seen == [[], [1], [1, 2], [1, 2, 3]]


def full_at(writes: Writes, *steps: int) -> None:
    def fill_the_disk(version):
        if version in steps:
            raise OSError(errno.ENOSPC, "No space left on device")

    writes.before = fill_the_disk


def test_a_write_that_fails_is_tried_again_at_the_next_save(tmp_path, monkeypatch, caplog):
    full_at(Writes(monkeypatch), 2, 3)
    run = start(tmp_path, "trainer.total_training_steps=5")
    run.fit()
    assert run.run.saved_step == 5 and CheckpointStore(run.run.run_dir).steps() == [1, 4, 5]
    assert not list(run.run.run_dir.glob(".tmp-global*"))
    for step in (2, 3):
        text = f"the checkpoint of step {step} could not be written to {run.run.run_dir}: [Errno 28]"
        assert caplog.text.count(text) == 1
    assert "GiB free" in caplog.text and "global_step_1 is intact" in caplog.text
    assert "Training goes on, and the next checkpoint is another try" in caplog.text


def test_a_last_write_that_fails_is_an_error_and_the_run_can_go_on(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    full_at(writes, 2, 3)
    run = start(tmp_path, "trainer.total_training_steps=3")
    with pytest.raises(WriteFailed, match="the checkpoint of step 3 could not be written.*global_step_1 is intact"):
        run.fit()
    manifest = json.loads((run.run.run_dir / "manifest.json").read_text())
    assert manifest["status"] == "failed" and "step 3 could not be written" in manifest["stopped_because"]
    again = start(tmp_path, "trainer.total_training_steps=4")
    writes.before = lambda version: None
    assert again.run.step == 1
    again.fit()
    assert again.run.saved_step == 4


def test_a_stop_whose_save_fails_is_no_success(tmp_path, monkeypatch):
    full_at(Writes(monkeypatch), 2)
    run = start(tmp_path, "trainer.total_training_steps=9", "trainer.save_freq=-1")
    complete = run.run.complete

    def completed(metrics, *rest):
        complete(metrics, *rest)
        if metrics.step == 2:
            run.run.stop.request()

    monkeypatch.setattr(run.run, "complete", completed)
    with pytest.raises(WriteFailed, match="step 2 could not be written"):
        run.fit()
    assert json.loads((run.run.run_dir / "manifest.json").read_text())["status"] == "failed"


def test_a_step_whose_write_failed_may_be_tried_again(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    writer = BackgroundWriter(CheckpointStore(tmp_path))
    writer.begin(1, None, lambda: lambda folder: (_ for _ in ()).throw(full))
    with pytest.raises(WriteFailed):
        writer.finish()
    assert writer.begun_step is None and writer.saved_step is None
    writer.begin(1, None, lambda: lambda folder: {})
    writer.finish()
    assert writer.saved_step == 1


def test_a_failed_last_write_ends_the_command_with_a_line_and_1(tmp_path, monkeypatch, capsys):
    full_at(Writes(monkeypatch), 1)
    run = start(tmp_path, "trainer.total_training_steps=1")
    with pytest.raises(SystemExit) as ended:
        train(lambda _: run, run.config)
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the checkpoint of step 1 could not be written" in last and "GiB free" in last and "Make room" in last


@pytest.mark.parametrize("kind", ["metrics.jsonl", "samples.jsonl", "manifest.json"])
def test_a_damaged_record_is_mended_before_a_model_loads(kind, tmp_path, monkeypatch, caplog):
    start(tmp_path, "trainer.total_training_steps=2", "trainer.val_before_train=True").fit()
    path = tmp_path / "run" / kind
    before = path.read_bytes()
    path.write_bytes(b"\xff broken\n" + (before if kind != "manifest" else b""))
    run = scripted()(configured(tmp_path, "run", "trainer.save_freq=1", "trainer.total_training_steps=3"), respond)
    make = run.make_workers

    def loads(device):
        assert path.with_name(f"{path.name}.damaged").exists(), "it was mended before"
        return make(device)

    monkeypatch.setattr(run, "make_workers", loads)
    run.init_workers().fit()
    assert run.run.step == 3 and CheckpointStore(tmp_path / "run").steps() == [1, 2, 3]
    assert path.name in caplog.text
    metrics = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [0, 1, 2, 3]


def test_what_was_begun_is_completed_when_the_loop_fails(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    ended = threading.Event()
    writes.before = lambda version: ended.wait(0.3)  # still at it when the error comes
    run = start(tmp_path, "trainer.total_training_steps=9", "trainer.save_freq=2")
    update = run.workers.update_actor

    def broken(batch, multiplier):
        if run.run.step == 2:
            raise RuntimeError("the third step fails")
        return update(batch, multiplier)

    monkeypatch.setattr(run.workers, "update_actor", broken)
    with pytest.raises(RuntimeError, match="the third step fails"):
        run.fit()
    assert run.run.saved_step == 2 and CheckpointStore(run.run.run_dir).latest().step == 2
