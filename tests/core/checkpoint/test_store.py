"""Checkpoints: what is complete, what is damaged, what is kept, beside other processes and on disks
that say no."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.checkpoint import store as checkpoint_store
from core.checkpoint.run_state import save_tensors
from core.checkpoint.store import (
    MANIFEST,
    CheckpointStore,
    DamagedCheckpoint,
    checkpoint_at,
    resolve_resume,
    verify,
)
from core.config.composition import compose
from core.errors import InputError, WriteFailed
from core.export import export
from core.learner.lora import add_adapters, save_adapters, trained_weights
from core.learner.saving import export_hf, save_files
from tests.checkpoints import FILES, LOOKING, RUN, Settings, flip_bit, names, write
from tests.forked import Forked, forked
from tests.tiny import tiny_model

TRACKER = "latest_checkpointed_iteration.txt"


def test_a_checkpoint_comes_back_with_its_files_and_its_run(tmp_path):
    store = CheckpointStore(tmp_path / "deep" / "run")
    assert store.latest() is None
    for step in (3, 9, 10):
        folder = write(store, step)
    found = CheckpointStore(store.root).latest()
    assert store.steps() == [3, 9, 10], "as numbers"
    assert (found.step, found.folder, set(found.files), found.provenance) == (
        10,
        folder,
        set(FILES),
        RUN,
    )
    assert (store.root / TRACKER).read_text() == "10\n"


def test_every_file_and_folder_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    calls = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def recorded(name):
        def call(*args):
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[0])
            events.append((name, path))
            calls[name](*args)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, recorded(name))
    write(CheckpointStore(tmp_path), 1)
    temporary = str(tmp_path / f".tmp-global_step_1-{os.getpid()}")
    renamed = events.index(("rename", temporary))
    before, after = [path for _, path in events[:renamed]], events[renamed + 1 :]
    for name in ("actor", *FILES, f"manifest.json.{os.getpid()}.partial"):
        assert f"{temporary}/{name}" in before
    assert before[-1] == temporary
    partial = str(tmp_path / f"{TRACKER}.{os.getpid()}.partial")
    assert after == [
        ("fsync", str(tmp_path)),
        ("fsync", partial),
        ("replace", partial),
        ("fsync", str(tmp_path)),
    ]


# ---------------------------------------------------------------- damage


def edited(folder: Path, change) -> None:
    """Change a manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGES = {
    "bit flip": (lambda folder: flip_bit(folder / FILES[0]), f"{FILES[0]} was altered"),
    "truncated": (lambda folder: os.truncate(folder / FILES[1], 10), f"{FILES[1]} has 10 bytes"),
    "file gone": (lambda folder: (folder / FILES[2]).unlink(), f"{FILES[2]} is missing"),
    "folder gone": (lambda folder: shutil.rmtree(folder / "actor"), "model.safetensors is missing"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
    "half a manifest": (lambda folder: os.truncate(folder / MANIFEST, 300), "is not a manifest"),
    "list of files": (
        lambda folder: edited(folder, lambda body: body.update(files=["a"])),
        "is not a manifest",
    ),
    "no run": (
        lambda folder: edited(folder, lambda b: b["provenance"].update(models=3)),
        "is not a manifest",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(damage, tmp_path, caplog):
    inflict, reason = DAMAGES[damage]
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        write(store, step)
    inflict(store.folder(2))
    with caplog.at_level(logging.WARNING):
        assert store.latest().step == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"{store.folder(2)}: " in message and "step 1" in message
    with pytest.raises(DamagedCheckpoint, match=reason):
        verify(store.folder(2))
    assert store.folder(2).exists(), "reading changes nothing"


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        flip_bit(write(store, step) / FILES[0])
    with pytest.raises(InputError) as raised:
        store.latest()
    assert all(str(store.folder(step)) in str(raised.value) for step in (1, 2))
    assert store.steps() == [1, 2]


def test_a_failing_block_leaves_nothing_behind_and_another_format_is_refused(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), store.writing(2) as folder:
            (folder / "half.bin").write_bytes(b"x")
            raise error
    assert names(tmp_path) == {"global_step_1", TRACKER}
    monkeypatch.setattr(checkpoint_store, "FORMAT", checkpoint_store.FORMAT + 1)
    with pytest.raises(InputError, match=f"has format {checkpoint_store.FORMAT - 1}"):
        store.latest()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="trainer.default_local_dir=.*cannot be written"):
        CheckpointStore(tmp_path / "file" / "run").claim()


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_as_many_checkpoints_stay_as_are_kept(tmp_path, keep):
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(2, 16, 2):
        write(store, step)
        assert store.steps() == [*range(2, step + 2, 2)][-keep:]


def test_a_checkpoint_that_is_read_outlives_the_writer_s_next_saves(tmp_path):
    """A run that only validates loads it, perhaps for minutes, beside one that trains and keeps one
    checkpoint."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    read = CheckpointStore(tmp_path).latest()
    write(store, 2)
    assert store.steps() == [1, 2] and verify(read.folder).step == 1
    read.release()
    write(store, 3)
    assert store.steps() == [3]


@pytest.mark.parametrize("name", ["../escaped", "actor/../../escaped", "/tmp/escaped"])
def test_a_hostile_checkpoint_writes_and_reads_nothing_outside(name, tmp_path):
    folder = write(CheckpointStore(tmp_path / "run"), 1)
    # There, with the hash that the manifest gives
    for path in (tmp_path / "escaped", tmp_path / "run" / "escaped"):
        path.write_bytes(b"owned")
    entry = {"bytes": 5, "sha256": hashlib.sha256(b"owned").hexdigest()}
    edited(folder, lambda body: body["files"].update({name: entry}))
    for source in (folder, tmp_path / "run"):
        with pytest.raises(InputError, match="leads out of its folder"):
            export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- what is kept


def test_the_newest_complete_ones_are_kept_also_after_a_restart(tmp_path):
    for step in (1, 2, 3):
        write(CheckpointStore(tmp_path, keep=2), step)  # a new store each time: a restart
    assert CheckpointStore(tmp_path).steps() == [2, 3]
    write(CheckpointStore(tmp_path, keep=1), 1)
    assert 1 in CheckpointStore(tmp_path).steps(), "the one just written stays"


def test_the_writer_sets_a_damaged_one_aside(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 3)
    flip_bit(write(store, 4) / FILES[0])
    write(store, 4)
    assert store.latest().step == 4 and len(list(tmp_path.glob("damaged-global_step_4-*"))) == 1


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path):
    others = {"global_step_7.bak", "global_step_08", ".tmp-notes"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_9").write_text("a file")
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    write(store, 2)
    assert names(tmp_path) == {*others, "global_step_9", "global_step_2", TRACKER}
    shutil.copytree(store.folder(2), store.folder(50))
    assert store.latest().step == 2, "a renamed folder is not a later step"


# ---------------------------------------------------------------- other processes, full disks


def claim(folder: Path, *, dies: bool = False) -> None:
    CheckpointStore(folder).claim()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_second_writer_is_refused_and_a_dead_one_forgotten(tmp_path):
    write(CheckpointStore(tmp_path), 1)
    leftover = tmp_path / ".tmp-global_step_2-1"
    leftover.mkdir()
    refused = forked(claim, tmp_path)
    assert "another process is writing" in refused.stderr and refused.returncode == 1
    assert leftover.exists(), "it may be the other process's"
    other = tmp_path / "other"
    assert forked(partial(claim, dies=True), other).returncode == -signal.SIGKILL
    (other / ".tmp-global_step_2-1").mkdir()
    (other / ".tmp-global_step_1-deleted").mkdir()
    CheckpointStore(other).claim()
    assert names(other) == set()


def test_a_reader_beside_a_busy_writer_always_finds_a_complete_one(tmp_path, caplog):
    # The harshest: what is being read is deleted at the next write
    store = CheckpointStore(tmp_path, keep=1)
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
    for step in range(2, 60):
        write(store, step)
    stop.set()
    reader.join()
    assert failures == [] and caplog.records == [], (
        "a folder that was pruned while it was read is not called damaged"
    )
    assert seen == sorted(seen) and len(set(seen)) > 3


def content(step: int, index: int) -> bytes:
    """Large enough for a kill to fall into its writing."""
    return (f"{step}-{index} ".encode() * 4000)[: 20_000 + 1000 * index]


def write_without_end(root: Path, first_step: int) -> None:
    """Write one checkpoint after another and print the step of each."""
    store = CheckpointStore(root, keep=2)
    for step in itertools.count(first_step):
        with store.writing(step) as folder:
            (folder / "actor").mkdir()
            for index in range(4):
                (folder / "actor" / f"{index}.bin").write_bytes(content(step, index))
        print(step)


def kill_writers(root: Path, times: int, rng: random.Random) -> int:
    """Start a writer, kill it at a random moment, check what it left; return how often the kill
    fell into a write."""
    last = interrupted = 0
    for _ in range(times):
        process = Forked(write_without_end, root, last + 1)
        process.stdout.readline()  # it is at work
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.end().stdout.split()]
        interrupted += any(root.glob(".tmp-*"))
        found = CheckpointStore(root).latest()
        assert found.step >= max(said, default=last), "what was reported as written must be there"
        assert found.step in (*said, max(said, default=last + 1) + 1, last + 1)
        for index in range(4):
            assert (found.folder / f"actor/{index}.bin").read_bytes() == content(found.step, index)
        last = found.step
    return interrupted


@pytest.mark.parametrize("times", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_writers_killed_at_random_moments_leave_a_complete_checkpoint(times, tmp_path):
    assert kill_writers(tmp_path, times, random.Random(0)) >= times // 4
    # Each kill between a write and its pruning leaves one more, until a write ends undisturbed
    store = CheckpointStore(tmp_path, keep=2)
    write(store, store.latest().step + 1)
    assert len(store.steps()) == 2


def test_a_full_disk_is_explained_and_the_previous_checkpoint_stands(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    with pytest.raises(WriteFailed) as raised, store.writing(2) as folder:
        (folder / "model.bin").symlink_to("/dev/full")
        (folder / "model.bin").write_bytes(b"x" * 100)
    message = str(raised.value)
    assert "step 2" in message and "No space left on device" in message
    assert "steps [1]" in message and "GiB free" in message
    assert names(tmp_path) == {"global_step_1", TRACKER} and store.latest().step == 1


def write_beyond_a_limit(root: Path) -> None:
    """Write files of each kind where a file may have 60 kB, and print what comes of it."""
    store, model = CheckpointStore(root), tiny_model(hidden_size=64)
    with store.writing(1) as folder:
        save_tensors(folder / "o.pt", {"x": torch.zeros(1000)})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    large = {"x": torch.zeros(100_000)}
    lora = ["actor_rollout_ref.model.lora_rank=64", "actor_rollout_ref.model.path=none"]
    settings = compose("grpo", lora).actor_rollout_ref.model
    adapted = add_adapters(tiny_model(hidden_size=64), settings, 1)
    writers = [
        lambda folder: save_files({"1.safetensors": large}, folder / "optimizer"),
        lambda folder: save_tensors(folder / "o.pt", large),
        lambda folder: export_hf(model, None, folder / "actor"),
        lambda folder: save_adapters(adapted, trained_weights(adapted), folder / "actor"),
    ]
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    for write_file in writers:
        try:
            with store.writing(2) as folder:
                write_file(folder)
        except WriteFailed as error:
            print(error)


def test_libraries_that_hide_the_reason_do_not_hide_it_from_the_user(tmp_path):
    done = forked(write_beyond_a_limit, tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert all("File too large" in line or "a file was cut short" in line for line in lines)
    assert CheckpointStore(tmp_path).latest().step == 1 and not list(tmp_path.glob(".tmp-*"))


# ---------------------------------------------------------------- where a run goes on


def test_auto_takes_the_newest_and_disable_starts_afresh_in_an_empty_folder_only(tmp_path):
    store = CheckpointStore(tmp_path)
    assert resolve_resume(Settings(), store) is resolve_resume(Settings("disable"), store) is None
    write(store, 2)
    folder = write(store, 4)
    assert resolve_resume(Settings(), store).step == 4
    flip_bit(folder / FILES[0])  # a damaged one can be mended and taken for ours as well
    with pytest.raises(
        InputError, match="trainer.resume_mode=disable .* already holds global_step_4"
    ):
        resolve_resume(Settings("disable"), store)
    assert resolve_resume(Settings("disable", val_only=True), store) is None


def test_resume_path_takes_the_one_that_is_named(tmp_path):
    other, store = CheckpointStore(tmp_path / "other"), CheckpointStore(tmp_path / "run")
    for step in (2, 4):
        write(other, step)
    (other.root / MANIFEST).write_text('{"status": "running"}')  # the run's own
    named = Settings("resume_path", str(other.folder(2)))
    assert resolve_resume(named, store).folder == other.folder(2)
    with pytest.raises(
        InputError, match="starts at step 2, but .*other already holds global_step_4"
    ):
        resolve_resume(named, other)
    flip_bit(other.folder(2) / FILES[1])
    with pytest.raises(DamagedCheckpoint, match="optimizer.pt was altered"):
        resolve_resume(named, store)
    for path in (other.root, "/nowhere/global_step_3"):
        with pytest.raises(InputError, match=f"key={path}: "):
            checkpoint_at(path, "key")


def test_looking_only_changes_nothing_and_takes_no_lock(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    write(store, 1)
    flip_bit(write(store, 2) / FILES[0])
    (store.root / ".tmp-global_step_3-1").mkdir()
    before = names(store.root)
    other = CheckpointStore(store.root)
    assert resolve_resume(LOOKING, other).step == 1 and other._lock is None
    assert names(store.root) == before
