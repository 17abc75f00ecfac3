"""Checkpoints are written beside training: what goes on meanwhile, what a failure ends, and what is on disk when."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest

from core.checkpoint.store import CheckpointStore
from core.errors import InputError
from core.session import Session
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
        complete, write = Session.complete_step, ScriptedSnapshot.write

        def completed(session, metrics, *rest):
            self.order.append(f"step {metrics.step}")
            self.steps[metrics.step].set()
            complete(session, metrics, *rest)

        def written(snapshot, folder):
            self.before(snapshot.version)
            self.order.append(f"wrote {snapshot.version}")
            return write(snapshot, folder)

        monkeypatch.setattr(Session, "complete_step", completed)
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
    assert run.session.saved_step == 3 and CheckpointStore(run.session.run_dir).steps() == [2, 3]
    stored = json.loads((run.session.store.folder(2) / "actor" / "version.json").read_text())
    assert stored == 2, "what is written is the state of its step"
    assert json.loads((run.session.store.folder(2) / "driver.json").read_text())["step"] == 2


def test_one_checkpoint_is_complete_before_the_next_begins(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Writes, "before", lambda self, version: None)
    Writes(monkeypatch)
    run = start(tmp_path, "trainer.total_training_steps=4")
    snapshot = run.workers.snapshot
    monkeypatch.setattr(run.workers, "snapshot", lambda: seen.append(run.session.store.steps()) or snapshot())
    run.fit()
    assert seen == [[], [1], [1, 2], [1, 2, 3]]


def test_a_write_that_fails_ends_the_run_and_leaves_the_one_before(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    failed = threading.Event()

    def fill_the_disk(version):
        if version == 2:
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")

    writes.before = fill_the_disk
    run = start(tmp_path, "trainer.total_training_steps=9")
    with pytest.raises(InputError, match="the checkpoint of step 2 could not be written.*global_step_1 is intact"):
        run.fit()
    assert failed.is_set() and run.session.saved_step == 1 and run.session.step < 5
    assert CheckpointStore(run.session.run_dir).steps() == [1]
    assert not list(run.session.run_dir.glob(".tmp-global*"))
    assert json.loads((run.session.run_dir / "manifest.json").read_text())["status"] == "failed"
    again = start(tmp_path, "trainer.total_training_steps=4")
    writes.before = lambda version: None
    assert again.session.step == 1
    again.fit()
    assert again.session.saved_step == 4


def test_what_was_begun_is_completed_when_the_loop_fails(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    ended = threading.Event()
    writes.before = lambda version: ended.wait(0.3)  # still at it when the error comes
    run = start(tmp_path, "trainer.total_training_steps=9", "trainer.save_freq=2")
    update = run.workers.update_actor

    def broken(batch, multiplier):
        if run.session.step == 2:
            raise RuntimeError("the third step fails")
        return update(batch, multiplier)

    monkeypatch.setattr(run.workers, "update_actor", broken)
    with pytest.raises(RuntimeError, match="the third step fails"):
        run.fit()
    assert run.session.saved_step == 2 and CheckpointStore(run.session.run_dir).latest().step == 2
