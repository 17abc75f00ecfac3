"""Whole runs with pictures: they train the tower, resume to the bit, export, and leave the tower
out where asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from core import export
from core.checkpoint.run_state import load_tensors
from core.config.composition import compose
from core.errors import InputError
from core.learner.models import load_modality, load_policy, load_tokenizer
from core.ray_trainer import RayPPOTrainer
from core.vision.learner_pictures import freeze_vision_tower
from tests.faults.tiny_run import REWARD, command
from tests.pictures import model_config, png, save_vision_model
from tests.row_files import plain_row, write_parquet
from tests.tiny import tiny_model

STALE = (
    *(
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.n=3",
        "trainer.max_staleness=1",
    ),
    "algorithm.rollout_correction.rollout_is=sequence",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    save_vision_model(folder / "model", initializer_range=0.05)
    (folder / "reward.py").write_text(REWARD)
    for name, count in (("train", 9), ("test", 3)):
        rows = []
        for index in range(count):
            images = [
                {"bytes": png(10 * index + i, 28 + 28 * i, 28), "path": None}
                for i in range(index % 3)
            ]
            prompt = [{"role": "user", "content": "<image>" * len(images) + "?"}]
            rows.append(plain_row(index, prompt=prompt, images=images))
        write_parquet(folder / f"{name}.parquet", rows)
    return folder


def trained(files: Path, run: Path, *overrides: str, steps: int = 4) -> dict[str, torch.Tensor]:
    """The policy's weights at the end."""
    texts = command(
        files, "grpo", steps, "trainer.logger=[]", "data.max_prompt_length=96", *overrides
    )(run)[3:]
    trainer = RayPPOTrainer(compose("grpo", texts)).init_workers()
    trainer.fit()
    return {
        name: value.clone()
        for name, value in trainer.workers.models.actor.module.state_dict().items()
    }


def lines(run: Path) -> list[dict]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "perf/")
    return [{key: value for key, value in one.items() if not key.startswith(timed)} for one in read]


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_it_would_have(files, tmp_path):
    whole = trained(files, tmp_path / "whole", *STALE)
    saved = tmp_path / "whole" / "global_step_2"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    parts = trained(files, tmp_path / "parts", *STALE, *resume)
    assert load_tensors(saved / "driver.pt")["carried"]
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert lines(tmp_path / "whole")[-1] == lines(tmp_path / "parts")[-1]
    before = load_policy(model_config(files / "model")).state_dict()
    assert (
        sum(
            not torch.equal(value, before[name])
            for name, value in whole.items()
            if "visual" in name
        )
        > 10
    )


def test_published_configurations_say_outside_of_the_text_whether_the_head_is_tied(files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"].pop("tie_word_embeddings")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    flat = load_policy(model_config(tmp_path / "model")).state_dict()
    assert flat.keys() == load_policy(model_config(files / "model")).state_dict().keys()


def test_a_frozen_tower_stays_the_rest_trains_and_an_export_reads_pictures_again(files, tmp_path):
    before = load_policy(model_config(files / "model")).state_dict()
    after = trained(
        files, tmp_path / "run", "actor_rollout_ref.actor.freeze_vision_tower=True", steps=2
    )
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved and not any("visual" in name for name in moved)
    adapters = ("actor_rollout_ref.model.lora_rank=2", "trainer.save_freq=0")
    frozen = "actor_rollout_ref.actor.freeze_vision_tower=True"
    names = {name for name in trained(files, tmp_path / "lora", frozen, *adapters, steps=1)}
    assert any("lora_A" in name for name in names)
    assert not any("visual" in name and "lora" in name for name in names)
    export.main([str(tmp_path / "run"), str(tmp_path / "model")])
    model = model_config(tmp_path / "model")
    loaded = load_policy(model).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in after.items())
    expected = load_modality(
        model_config(files / "model"), load_tokenizer(model_config(files / "model"))
    )
    assert load_modality(model, load_tokenizer(model)) == expected and expected.format is not None
    with pytest.raises(InputError, match="freeze_vision_tower=True: .* reads text alone"):
        freeze_vision_tower(tiny_model())
