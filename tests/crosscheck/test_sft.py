"""Supervised fine-tuning beside TRL's SFTTrainer: ids, masks, loss and gradients of the same chats.

TRL lives in the environment of ``bash tests/crosscheck/make_env.sh``. Its step accumulates three micro-batches, ours is
cut by tokens, padded and packed: the mean over all trained tokens of the step is the same number.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes.sft.demonstrations import Writer
from tests.recipes.sft_data import chats, configured, learner_gradients, prepare, tokenizer

HERE = Path(__file__).parent
PYTHON = HERE / ".venv" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="bash tests/crosscheck/make_env.sh makes the environment with TRL"),
]
CHATS = chats(9, seed=5)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder with TRL's ids, loss and gradients."""
    folder = prepare(tmp_path_factory.mktemp("trl"))
    (folder / "chats.json").write_text(json.dumps(CHATS))
    done = subprocess.run(
        [PYTHON, HERE / "trl_sft.py", folder], capture_output=True, text=True, timeout=280, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "loss.json").write_text(done.stdout.strip().splitlines()[-1])
    return folder


def test_ids_and_masks_are_trls(published):
    for row, chat in zip(json.loads((published / "ids.json").read_text()), CHATS, strict=True):
        ours = Writer(tokenizer(), {}, {1}).chat(chat)
        trained = row.get("assistant_masks") or [label != -100 for label in row["labels"]]
        assert row["input_ids"] == ours.ids.tolist() and [bool(one) for one in trained] == ours.mask.tolist()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_loss_and_gradients_are_trls(packed, published):
    keys = ("data.train_batch_size=9", f"actor_rollout_ref.model.use_remove_padding={packed}")
    demonstrations = [Writer(tokenizer(), {}, {1}).chat(chat) for chat in CHATS]
    loss, gradients, _ = learner_gradients(configured(published, *keys), demonstrations, torch.float32)
    theirs = load_file(published / "gradients.safetensors")
    assert loss == pytest.approx(json.loads((published / "loss.json").read_text())["loss"], rel=1e-5)
    assert theirs.keys() == gradients.keys()
    for name, value in theirs.items():
        assert float((gradients[name] - value).norm()) <= 1e-5 * max(float(value.norm()), 1e-3), name
