"""Checkpoints beside other processes, killed ones included, and on disks that say no."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.checkpoint.store import CheckpointStore
from core.errors import InputError
from tests.checkpoints import ROOT, names, run, write
from tests.faults.endless_writer import content

CLAIM = "import sys; from core.checkpoint.store import CheckpointStore as S; S(sys.argv[1]).claim(); print('claimed')"


def test_a_second_writer_is_refused_and_a_dead_one_forgotten(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    leftover = tmp_path / ".tmp-global_step_2-1"
    leftover.mkdir()
    refused = run(CLAIM, tmp_path)
    assert "another process is writing checkpoints" in refused.stderr and refused.returncode == 1
    assert leftover.exists(), "it may be the other process's"
    other = tmp_path / "other"
    killed = run(CLAIM.replace("print", "import os; os.kill(os.getpid(), 9); print"), other)
    assert killed.returncode == -9
    (other / ".tmp-global_step_2-1").mkdir()
    (other / ".trash-global_step_1").mkdir()
    assert run(CLAIM, other).stdout == "claimed\n"
    assert names(other) == set()


def test_a_reader_beside_a_busy_writer_always_finds_a_complete_one(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=1)  # the harshest: what is being read is deleted at the next write
    write(store, 1)
    stop, seen, failures = threading.Event(), [], []

    def read():
        while not stop.is_set():
            try:
                seen.append(CheckpointStore(tmp_path).latest().step)
            except Exception as error:  # whatever it is, the main thread shows it
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 80):
        write(store, step)
    stop.set()
    reader.join()
    assert failures == []
    assert caplog.records == [], "a folder that was pruned while it was read is not called damaged"
    assert seen == sorted(seen) and len(set(seen)) > 3


def kill_writers(root: Path, times: int, rng: random.Random) -> int:
    """Starts a writer, kills it at a random moment, checks what it left; ``times`` times.

    Returns how often the kill fell into a write.
    """
    last = interrupted = 0
    for _ in range(times):
        command = [sys.executable, "-m", "tests.faults.endless_writer", str(root), str(last + 1)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()  # it is at work
            time.sleep(rng.uniform(0, 0.03))
            process.kill()
            said = [int(line) for line in process.stdout.read().split()]
        interrupted += any(root.glob(".tmp-*"))
        found = CheckpointStore(root).latest()
        assert found.step >= max(said, default=last), "what was reported as written must be there"
        assert found.step in (*said, max(said, default=last + 1) + 1, last + 1)
        for index in range(4):
            assert found.path(f"actor/{index}.bin").read_bytes() == content(found.step, index)
        last = found.step
    return interrupted


def test_writers_killed_at_random_moments_leave_a_complete_checkpoint(tmp_path):
    assert kill_writers(tmp_path, 12, random.Random(0)) > 2
    assert len(CheckpointStore(tmp_path).steps()) <= 3  # two kept, one more if killed before pruning


@pytest.mark.slow
def test_writers_killed_two_hundred_times(tmp_path):
    assert kill_writers(tmp_path, 200, random.Random(1)) > 50


def test_a_full_disk_is_explained_and_the_previous_checkpoint_stands(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    with pytest.raises(InputError) as raised, store.writing(2) as folder:
        (folder / "model.bin").symlink_to("/dev/full")
        (folder / "model.bin").write_bytes(b"x" * 100)
    message = str(raised.value)
    assert "the checkpoint of step 2 could not be written" in message and "No space left on device" in message
    assert f"{store.folder(1)} is intact" in message and "GiB free" in message
    assert names(tmp_path) == {"global_step_1", "latest_checkpointed_iteration.txt"}
    assert store.latest().step == 1


LIMITED = """
import resource, sys, torch, logging
from pathlib import Path
from core.checkpoint.store import CheckpointStore
from core.checkpoint.run_state import save_tensors
store = CheckpointStore(sys.argv[1])
with store.writing(1) as folder:
    save_tensors(folder / "o.pt", {"x": torch.zeros(1000)})
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
with store.writing(2) as folder:
    if sys.argv[2] == "ranks":
        import torch.distributed as dist
        from core.learner.saving import save_optimizer
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        save_optimizer({"x": torch.zeros(100_000)}, folder / "optimizer", dist.group.WORLD)
    elif sys.argv[2] == "torch":
        save_tensors(folder / "o.pt", {"x": torch.zeros(100_000)})
    else:
        from core.learner.hf_export import export_hf
        from tests.tiny import tiny_model
        export_hf(tiny_model(hidden_size=64), None, folder / "actor")
"""


@pytest.mark.parametrize("writer", ["torch", "safetensors", "ranks"])
def test_libraries_that_hide_the_reason_do_not_hide_it_from_the_user(writer, tmp_path):
    done = run(LIMITED, tmp_path, writer)
    last = done.stderr.splitlines()[-1]
    assert "WriteFailed: the checkpoint of step 2 could not be written" in last, done.stderr
    assert "File too large" in last or "a file was cut short" in last
    assert CheckpointStore(tmp_path).latest().step == 1
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="cannot write checkpoints to .*trainer.default_local_dir"):
        CheckpointStore(tmp_path / "file" / "run").claim()
