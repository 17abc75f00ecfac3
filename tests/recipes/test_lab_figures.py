"""The figures task: four answers that are equally frequent, held-out figures, and a model that learns to look."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from core.config import compose
from core.ray_trainer import RayPPOTrainer
from core.vision.pictures import read_picture
from recipes.lab import figures
from recipes.lab.figures import Figure
from tests.pictures import picture_format


def test_whoever_does_not_look_is_right_in_one_of_four():
    for drawn in figures.splits().values():
        by_kind = defaultdict(Counter)
        for one in drawn:
            by_kind[one.question[0]][one.answer] += 1
        for counts in by_kind.values():
            assert len(counts) == 4 and max(counts.values()) < 0.35 * counts.total()


def test_no_arrangement_of_the_test_is_trained_on():
    found = {split: {one.cells for one in drawn} for split, drawn in figures.splits().items()}
    assert not found["train"] & found["test"] and len(found["test"]) > 50
    assert not any(map(figures.is_held_out, found["train"]))


def test_a_picture_follows_from_its_seed_and_is_a_token_a_cell():
    one = Figure("rgby", "m", 3)
    assert one.drawn() == one.drawn() != Figure("rgby", "m", 4).drawn()
    assert read_picture(one.drawn(), picture_format(), decode=True).tokens == figures.ROWS * figures.COLUMNS


def accuracies(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = "val-core/lab/figures/acc/mean@1"
    return [line[key] for line in lines if key in line]


@pytest.mark.slow
def test_looking_is_learned_and_without_pictures_nothing_is(tmp_path, monkeypatch):
    """From at most 0.5 to at least 0.9 on held-out figures; the control stays at chance, 0.25."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    figures.prepare(blank=True)
    blank = [
        f"data.{kind}_files=./outputs/lab/figures/blank_{split}.parquet"
        for kind, split in (("train",) * 2, ("val", "test"))
    ]
    for name, keys in (("seeing", []), ("blank", blank)):
        more = [f"trainer.experiment_name={name}", "trainer.cpu_threads=1", "trainer.logger=[]", *keys]
        trainer = RayPPOTrainer(compose("grpo", ["preset=lab_figures", *more])).init_workers()
        trainer.fit()
        before, *_, after = accuracies(Path("outputs/grpo") / name)
        assert before <= 0.5
        assert after >= 0.9 if name == "seeing" else 0.15 <= after <= 0.35
