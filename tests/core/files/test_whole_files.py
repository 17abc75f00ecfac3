"""Files that a download left incomplete are found before a model loads, with their sizes and the fix."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from core.config import compose
from core.data.parquet import ExampleFile
from core.errors import InputError
from core.files import damage
from core.learner.models import readable, resolve_path
from core.ray_trainer import RayPPOTrainer


@pytest.fixture
def model(tmp_path):
    """A folder with the files of a model, in no shape that could be loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    save_file({"a": np.zeros((30, 4), np.float32), "b": np.ones(7, np.float32)}, folder / "model.safetensors")
    return folder


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def test_whole_files_are_whole(model):
    assert damage(model) is None and damage(model / "nothing") is None
    for extra in ("notes.json", "optimizer.safetensors", "tokenizer.model"):  # nobody reads them
        (model / extra).write_text("{")
    assert damage(model) is None and resolve_path(str(model)) == str(model)


@pytest.mark.parametrize("size", [1, 7, 8, 60, 200, -1])
def test_cut_weights_are_named_with_both_sizes(model, size):
    path = model / "model.safetensors"
    whole = path.stat().st_size
    cut(path, size)
    found = damage(model)
    assert found.startswith("model.safetensors is cut short: it has ") or size < 8
    if size in (200, -1):
        assert f"it has {path.stat().st_size:,} bytes, and its header names {whole:,}" in found
    with pytest.raises(InputError, match="model.path=.*model.safetensors is .*; download it again"):
        resolve_path(str(model))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"", r"is empty \(0 bytes\)"),
        ("model.safetensors", b"<!DOCTYPE html><html>404</html>", "is no safetensors file"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "is no safetensors file"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0,', "is cut short or no JSON: it has 28 bytes"),
        ("config.json", b"", "is empty"),
        ("tokenizer_config.json", b"{", "is cut short or no JSON"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 988097824\n",
            "is a Git LFS pointer of .* bytes to a file of 988097824, which was not fetched",
        ),
    ],
)
def test_other_remains_of_a_download(model, name, content, said):
    (model / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} {said}"):
        resolve_path(str(model))


def test_a_file_with_bytes_too_many_is_not_whole(model):
    with open(model / "model.safetensors", "ab") as file:
        file.write(b"x")
    assert "is too long" in damage(model)


def test_the_parts_of_a_large_model(model):
    (model / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": np.zeros(9, np.float32)}, model / names[0])
    assert f"names 2 files, of which 1 are not there ({names[1]})" in damage(model)
    assert damage(model, weights=False) is None
    save_file({"b": np.zeros(9, np.float32)}, model / names[1])
    assert damage(model) is None
    cut(model / names[1], -1)
    assert damage(model).startswith(f"{names[1]} is cut short")


def test_weights_of_torch(model):
    (model / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1000)}, model / "pytorch_model.bin")
    assert damage(model) is None
    cut(model / "pytorch_model.bin", 2000)
    assert "pytorch_model.bin is cut short: it has 2,000 bytes, and lacks the directory" in damage(model)


@pytest.mark.parametrize("size", [0, 3, 10, 200, -1, -5])
def test_cut_parquet_is_named_where_it_is_read(tmp_path, size):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 50}), path)
    assert damage(path) is None
    cut(path, size)
    with pytest.raises(InputError, match="not a readable parquet file"):
        ExampleFile(str(path))


MODELS = ("actor_rollout_ref.model.path", "critic.model.path")
JUDGED = ("reward_model.enable=True", "reward_model.weight=1")


@pytest.mark.parametrize("key", [*MODELS, "reward_model.model.path"])
def test_the_files_of_every_model_are_looked_at_before_the_first_loads(model, tmp_path, key):
    cut_model = tmp_path / "cut"
    shutil.copytree(model, cut_model)
    cut(cut_model / "model.safetensors", -1)
    names, more = (MODELS, ()) if key in MODELS else ((*MODELS, key), JUDGED)
    config = compose("ppo", [*(f"{name}={cut_model if name == key else model}" for name in names), *more])
    with pytest.raises(InputError, match=f"{key}={cut_model}: model.safetensors is cut short"):
        RayPPOTrainer(config).load_data()


def test_an_error_of_safetensors_names_the_model(model):
    from safetensors import safe_open

    cut(model / "model.safetensors", -1)
    with pytest.raises(InputError, match="cannot be read"), readable(str(model)):
        safe_open(model / "model.safetensors", "numpy")
