"""Artefacts from somebody else: the names of files that they list, and what they hold in place of numbers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from types import SimpleNamespace

import pytest
import torch

from core.checkpoint import store
from core.checkpoint.store import MANIFEST, DamagedCheckpoint, verify
from core.errors import InputError
from core.export import export
from core.files import inside, plain_name
from core.learner.saving import DESCRIPTION, PlainPlanner, PlainReader
from tests.checkpoints import CheckpointStore, write

HOSTILE = ["actor/../../escaped", "../escaped", "..", "/tmp/escaped", "actor//tmp/escaped", "", "actor\\..\\escaped"]
HOSTILE += ["actor/escaped\0.json", "actor/", 3, None, ["actor", "x"]]


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_a_name_that_leads_out_of_its_folder_is_refused(name, tmp_path):
    for check in (lambda: plain_name(name, "MANIFEST"), lambda: inside(tmp_path, name, "MANIFEST")):
        with pytest.raises(InputError, match=r"MANIFEST: the file name .* leads out of its folder, or is no name"):
            check()


@pytest.mark.parametrize("name", ["a", "a/b.json", "actor/__0_0.distcp", "..a", "a..b/.c", "é/中", "a b", "~x", "-x"])
def test_ordinary_names_are_names(name, tmp_path):
    assert inside(tmp_path, name, "") == tmp_path / name


def test_a_link_that_leads_out_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "folder" / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "link/new", "dangling", "dangling/x"):
        with pytest.raises(InputError, match="is a link out of its folder"):
            inside(tmp_path / "folder", name, "")
    (tmp_path / "way").symlink_to(tmp_path / "folder")  # the folder itself may be one: who names it chose it
    assert inside(tmp_path / "way", "x", "") == tmp_path / "way" / "x"


def altered(folder, change):
    """Rewrite a checkpoint's manifest, with a hash that is right."""
    body = json.loads((folder / MANIFEST).read_text())["body"]
    change(body)
    (folder / MANIFEST).write_text(json.dumps({"sha256": store._digest(body), "body": body}))


def entry(data=b"owned"):
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("name", ["../escaped", "actor/../../escaped", "/tmp/escaped"])
def test_a_hostile_checkpoint_writes_and_reads_nothing_outside(name, tmp_path):
    folder = write(CheckpointStore(tmp_path / "run"), 1)
    before = (tmp_path / "escaped", tmp_path / "run" / "escaped")
    for path in before:  # so that the file is there, with the hash that the manifest gives
        path.write_bytes(b"owned")
    altered(folder, lambda body: body["files"].update({name: entry()}))
    for hashes in (True, False):
        with pytest.raises(DamagedCheckpoint, match="leads out of its folder"):
            verify(folder, hashes=hashes)
    for source in (folder, tmp_path / "run"):
        with pytest.raises(InputError, match="leads out of its folder"):
            export(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["escaped", "run"]
    assert not (tmp_path / "out").exists()


def test_a_link_in_a_checkpoint_is_refused(tmp_path):
    folder = write(CheckpointStore(tmp_path / "run"), 1)
    (tmp_path / "secret").write_bytes(b"owned")
    (folder / "actor" / "config.json").symlink_to(tmp_path / "secret")
    altered(folder, lambda body: body["files"].update({"actor/config.json": entry()}))
    with pytest.raises(DamagedCheckpoint, match="is a link out of"):
        verify(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(files=["actor/x"]),
        lambda body: body.update(files={"driver.json": 3}),
        lambda body: body.update(files={"driver.json": {"bytes": "many", "sha256": ""}}),
        lambda body: body.update(step="1"),
        lambda body: body.pop("step"),
        lambda body: body["provenance"].update(models=3),
        lambda body: body["provenance"].update(more=3),
    ],
)
def test_a_manifest_of_another_form_is_a_damaged_checkpoint(change, tmp_path):
    folder = write(CheckpointStore(tmp_path / "run"), 1)
    altered(folder, change)
    with pytest.raises(DamagedCheckpoint, match="is not a manifest"):
        verify(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b", 3])
def test_an_index_of_weights_names_files_beside_it(name, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    (tmp_path / "config.json").write_text("{}")
    from core.learner.models import resolve_path

    with pytest.raises(InputError, match="leads out of its folder"):
        resolve_path(str(tmp_path))
    part = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": {"w": part}}))
    (tmp_path / part).write_bytes((2).to_bytes(8, "little") + b"{}")  # whole, without tensors
    assert resolve_path(str(tmp_path)) == str(tmp_path)


def test_adapters_beside_whole_weights_are_not_followed(tmp_path):
    from core.learner.hf_export import load_weights

    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(InputError, match="adapters, and this run has none"):
        load_weights(SimpleNamespace(), tmp_path)


class Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["RLREPRO_TEST_PAYLOAD"],)


def test_a_sharded_optimizer_runs_no_code(tmp_path, monkeypatch):
    """Its description is a pickle, and so are its numbers; torch reads both as they come."""
    monkeypatch.setenv("RLREPRO_TEST_PAYLOAD", str(tmp_path / "payload"))
    torch.save(Payload(), tmp_path / DESCRIPTION)
    with pytest.raises(DamagedCheckpoint, match="is no description"):
        PlainReader(tmp_path).read_metadata()
    item, data = SimpleNamespace(dest_index=SimpleNamespace(fqn="x")), io.BytesIO()
    torch.save(Payload(), data)
    data.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        PlainPlanner().load_bytes(item, data)
    assert not (tmp_path / "payload").exists()
