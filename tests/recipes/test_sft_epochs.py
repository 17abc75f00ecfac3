"""What the epochs of fine-tuning train on: every demonstration, the last ones in a short batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from core.learner.models import load_policy
from recipes.sft.demonstrations import Demonstration
from recipes.sft.sft_trainer import RaySFTTrainer
from tests.recipes.sft_data import configured, prepare
from tests.recipes.test_sft import fitted, lines


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("sft"))


EPOCHS = ("trainer.total_training_steps=null", "data.shuffle=False")


def drawn(files: Path, folder: Path, *overrides: str) -> tuple[list[int], RaySFTTrainer]:
    """Return the indices of the demonstrations in the order in which a run trains on them."""
    run = RaySFTTrainer(
        configured(files, f"trainer.default_local_dir={folder}", *EPOCHS, *overrides)
    )
    indices: list[int] = []
    run.init_workers()
    prompt = run.stream.files.prompt
    run.stream.files.prompt = lambda index, ordinal: indices.append(index) or prompt(index, ordinal)
    run.fit()
    return indices, run


@pytest.mark.parametrize(
    ("epochs", "batch", "steps"), [(2, 4, 7), (1, 4, 4), (1, 20, 1), (1, 13, 1)]
)
def test_epochs_train_on_every_demonstration_the_last_ones_in_a_short_batch(
    files, tmp_path, epochs, batch, steps
):
    line = (f"trainer.total_epochs={epochs}", f"data.train_batch_size={batch}")
    indices, run = drawn(files, tmp_path / "run", *line)
    assert indices == [*range(13)] * epochs
    assert run.run.step == run.run.total_steps == steps and run.run.finished()
    last = lines(tmp_path / "run")[-1]
    assert last["training/epoch"] == epochs - 1 and last["actor/lr"] > 0


def test_more_epochs_behind_a_short_last_batch_lose_no_demonstration(files, tmp_path):
    first, _ = drawn(files, tmp_path / "run", "trainer.total_epochs=2")
    more, run = drawn(files, tmp_path / "run", "trainer.total_epochs=3")
    assert first + more == [*range(13)] * 3
    assert run.run.outcome() == "finished after step 11 of 11"  # 7 and 4: the seventh had two


def test_a_short_last_batch_gives_each_of_its_tokens_the_weight_of_that_step(files, tmp_path):
    """The loss is the mean over the tokens of the two demonstrations that are left, not over
    four."""
    folder = tmp_path / "run"
    run = fitted(files, folder, *EPOCHS, "trainer.total_epochs=2")
    before = load_policy(
        configured(
            files, f"actor_rollout_ref.model.path={folder}/global_step_6/actor"
        ).actor_rollout_ref.model
    )
    last = [run.stream.prompt(ordinal) for ordinal in (24, 25)]
    with torch.no_grad():
        sums, tokens = zip(*(summed_nll(before, each) for each in last), strict=True)
    assert lines(folder)[-1]["actor/nll"] == pytest.approx(sum(sums) / sum(tokens), abs=1e-5)
    assert lines(folder)[-1]["sft/tokens_trained"] == sum(tokens)


def summed_nll(module, demonstration: Demonstration) -> tuple[float, int]:
    ids = torch.from_numpy(demonstration.ids).long()
    logits = module(ids[None]).logits[0, :-1].float()
    nll = F.cross_entropy(logits, ids[1:], reduction="none")
    mask = torch.from_numpy(demonstration.mask[1:])
    return float(nll[mask].sum()), int(mask.sum())


def test_a_checkpoint_after_each_epoch(files, tmp_path):
    """13 chats, 4 a step: the first epoch ends in step 4, the second one in step 7, which is
    short."""
    keys = ("trainer.save_freq=after_each_epoch", "trainer.total_epochs=2")
    fitted(files, tmp_path / "run", *EPOCHS, *keys)
    assert {path.name for path in (tmp_path / "run").glob("global_step_*")} == {
        "global_step_4",
        "global_step_7",
    }
