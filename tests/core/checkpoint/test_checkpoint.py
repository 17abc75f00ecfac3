"""Checkpoints: what is complete, what is damaged, what is kept."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest

from core.checkpoint import store as checkpoint_store
from core.checkpoint.store import CheckpointStore, DamagedCheckpoint
from core.errors import InputError
from tests.checkpoints import FILES, RUN, flip_bit, names, write

# ---------------------------------------------------------------- writing and reading


def test_a_checkpoint_comes_back_with_its_files_and_its_run(tmp_path):
    store = CheckpointStore(tmp_path / "deep" / "run")
    assert store.latest() is None
    folder = write(store, 3)
    found = CheckpointStore(store.root).latest()
    assert (found.step, found.folder, set(found.files)) == (3, folder, set(FILES))
    assert found.provenance == RUN
    assert found.path("actor/optimizer.pt").read_bytes().startswith(b"actor/optimizer.pt of step 3")
    assert found.path("actor").is_dir()
    assert (store.root / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    with pytest.raises(InputError, match="holds no critic; it holds actor/model.safetensors"):
        found.path("critic")


def test_the_manifest_is_readable_by_people(tmp_path):
    body = json.loads((write(CheckpointStore(tmp_path), 1) / "manifest.json").read_text())["body"]
    assert body["step"] == 1 and body["provenance"]["models"]["actor"]["shapes"]["embed"] == [100, 32]


def test_steps_are_ordered_as_numbers(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (9, 10, 100):
        write(store, step)
    assert store.steps() == [9, 10, 100]
    assert store.latest().step == 100


def test_every_file_and_folder_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(handle):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        real_fsync(handle)

    def rename(source, target):
        events.append(("rename", str(source)))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("replace", str(a))), real_replace(a, b)))
    write(CheckpointStore(tmp_path), 1)
    temporary = str(tmp_path / f".tmp-global_step_1-{os.getpid()}")
    renamed = events.index(("rename", temporary))
    before, after = [path for _, path in events[:renamed]], events[renamed + 1 :]
    for name in ("actor", *FILES, f"manifest.json.{os.getpid()}.partial"):
        assert f"{temporary}/{name}" in before
    assert before[-1] == temporary
    assert after[0] == ("fsync", str(tmp_path))
    partial = str(tmp_path / f"latest_checkpointed_iteration.txt.{os.getpid()}.partial")
    assert after[1:] == [("fsync", partial), ("replace", partial), ("fsync", str(tmp_path))]


def test_a_failing_block_leaves_nothing_behind(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), store.writing(2) as folder:
            (folder / "half.bin").write_bytes(b"x")
            raise error
    assert names(tmp_path) == {"global_step_1", "latest_checkpointed_iteration.txt"}


def test_a_step_written_twice_keeps_the_first_under_another_name(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    with store.writing(1) as folder:
        (folder / "new").write_text("new")
    assert set(store.latest().files) == {"new"}
    assert names(tmp_path) == {"global_step_1", "damaged-global_step_1", "latest_checkpointed_iteration.txt"}


# ---------------------------------------------------------------- damage


DAMAGES = {
    "bit flip": (lambda folder: flip_bit(folder / FILES[0]), r"actor/model.safetensors was altered: its SHA-256"),
    "truncated": (lambda folder: os.truncate(folder / FILES[1], 10), r"actor/optimizer.pt has 10 bytes, the manifest"),
    "grown": (lambda folder: os.truncate(folder / FILES[2], 10_000), r"driver.json has 10000 bytes, the manifest says"),
    "file gone": (lambda folder: (folder / FILES[2]).unlink(), r"driver.json is missing"),
    "folder gone": (lambda folder: shutil.rmtree(folder / "actor"), r"actor/model.safetensors is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"no readable manifest.json"),
    "empty manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), r"manifest.json is not a manifest"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 300), r"manifest.json is not a manifest"),
    "manifest of something else": (
        lambda folder: (folder / "manifest.json").write_text('{"status": "done"}'),
        r"manifest.json is not a manifest \(KeyError: 'body'\)",
    ),
    "binary manifest": (
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00\x80"),
        r"manifest.json is not a manifest",
    ),
    "edited manifest": (
        lambda folder: (folder / "manifest.json").write_text(
            (folder / "manifest.json").read_text().replace('"seed": 1', '"seed": 2')
        ),
        r"manifest.json was altered",
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
    assert f"{store.folder(2)}: " in message and "using step 1 instead" in message
    with pytest.raises(DamagedCheckpoint, match=reason):
        store.at(store.folder(2))
    assert store.folder(2).exists(), "reading changes nothing"


def test_a_renamed_folder_is_not_taken_for_a_later_step(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    shutil.copytree(store.folder(1), store.folder(50))
    assert store.latest().step == 1
    with pytest.raises(DamagedCheckpoint, match="the manifest is of step 1: the folder was renamed"):
        store.at(store.folder(50))


def test_every_single_bit_of_a_small_file_counts(tmp_path):
    store = CheckpointStore(tmp_path)
    with store.writing(1) as folder:
        (folder / "x").write_bytes(b"\x00\xff")
    for bit in range(16):
        data = bytearray(b"\x00\xff")
        data[bit // 8] ^= 1 << bit % 8
        (store.folder(1) / "x").write_bytes(data)
        with pytest.raises(DamagedCheckpoint):
            store.at(store.folder(1))


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        flip_bit(write(store, step) / FILES[0])
    with pytest.raises(InputError, match="every checkpoint in .* is damaged") as raised:
        store.latest(tidy=True)
    assert str(store.folder(1)) in str(raised.value) and str(store.folder(2)) in str(raised.value)
    assert store.steps() == [1, 2]


def test_the_writer_sets_damaged_ones_aside_and_prunes(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        write(store, step)
    flip_bit(store.folder(4) / FILES[0])
    assert CheckpointStore(tmp_path, keep=1).latest(tidy=True).step == 3
    kept = names(tmp_path) - {"latest_checkpointed_iteration.txt"}
    assert kept == {"damaged-global_step_4", "global_step_3"}
    flip_bit(write(store, 4) / FILES[0])
    write(store, 4)  # over a damaged one
    assert store.latest().step == 4
    assert {"damaged-global_step_4", "damaged-global_step_4-2"} < names(tmp_path)


def test_a_later_format_is_refused_and_not_skipped(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    monkeypatch.setattr(checkpoint_store, "FORMAT", 4)
    write(store, 2)
    monkeypatch.undo()
    with pytest.raises(InputError, match="has format 4, this code reads 3"):
        store.latest()


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "global_step_7.bak").mkdir()
    (tmp_path / "global_step_08").mkdir()
    (tmp_path / "global_step_9").write_text("a file")
    (tmp_path / ".tmp-notes").mkdir()
    write(store, 1)
    write(store, 2)
    assert store.latest().step == 2
    assert names(tmp_path) >= {"global_step_7.bak", "global_step_08", "global_step_9", ".tmp-notes"}


# ---------------------------------------------------------------- pruning


def test_the_newest_are_kept_also_after_a_restart(tmp_path):
    for step in (1, 2, 3):
        write(CheckpointStore(tmp_path, keep=2), step)  # a new store each time: a restart
    assert CheckpointStore(tmp_path).steps() == [2, 3]


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    write(store, 2)
    (store.folder(2) / FILES[0]).unlink()
    write(store, 3)
    assert store.steps() == [1, 2, 3], "1 is the second newest complete one; 2 is not ours to delete silently"


def test_the_one_just_written_is_never_pruned(tmp_path):
    for step in (8, 9):
        write(CheckpointStore(tmp_path), step)
    write(CheckpointStore(tmp_path, keep=1), 5)
    assert 5 in CheckpointStore(tmp_path).steps()


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep, tmp_path):
    with pytest.raises(InputError, match=f"max_actor_ckpt_to_keep={keep}: must be null"):
        CheckpointStore(tmp_path, keep=keep)
