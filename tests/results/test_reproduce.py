"""``reproduce.sh``: every table's stages in a dry run, what is refused, and the lab from data to table in a copy."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from core.errors import InputError
from recipes.lab import base_model
from results import reproduce
from results.reporting.references import read_references
from tests.recipes.test_lab import SMALL
from tests.test_readme_commands import copy_of_the_repository

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/reproduce.yaml"))
SHORT = ("trainer.total_training_steps=3", "trainer.save_freq=3", "trainer.backend=local", "data.val_max_samples=40")


def test_every_paper_has_a_script_that_lists_its_tables(capsys):
    assert RECIPES == ["dapo", "grpo", "ppo", "search_r1"]
    for recipe in RECIPES:
        assert os.access(ROOT / "recipes" / recipe / "reproduce.sh", os.X_OK)
        assert reproduce.main([recipe]) == 0
        printed = capsys.readouterr().out
        for table in reproduce.read_tables(recipe)["tables"]:
            assert f"\n{table}: " in printed
        assert "\nlab: " in printed


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_those_of_the_references_and_every_one_that_can_be_repeated_has_all_stages(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    known = {row["id"]: row for row in read_references(ROOT / "results")["references"]}
    for table in reproduce.read_tables(recipe)["tables"]:
        for row in reproduce.rows_of(recipe, table, ()):
            assert not row.named or "not_reproducible" not in known[row.name]
            stages = list(reproduce.stages(row, 1, ()))
            names = [stage.name for stage in stages]
            if "eval.sh" in row.command:
                assert names == ["evaluate"]
                continue
            assert names[-5:] == ["train", "generate", "score", "report", "publish"] and set(names[:-5]) == {"data"}
            train = next(stage for stage in stages if stage.name == "train")
            assert f"trainer.experiment_name={row.name}-seed1" in train.command and train.cost.startswith("about ")
            assert (f"trainer.reference={row.name}" in train.command) == row.named
            assert not any(stage.done() for stage in stages)


def test_a_row_that_nobody_can_repeat_and_unknown_names_are_refused_by_name():
    for words, message in (
        (["dapo", "table9"], "table=table9: is not a table of dapo; choose one of table1, "),
        (["dapo", "table1", "dapo-64b"], "row=dapo-64b: is not in table1 of dapo; choose one of dapo-32b-r1-zero"),
        (["dapo", "table1", "dapo-32b-r1-zero"], "row=dapo-32b-r1-zero: cannot be repeated: "),
        (["gspo", "table1"], "gspo: has no reproduce.yaml; choose one of dapo, grpo"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            reproduce.rows_of(words[0], words[1], words[2:])
        assert reproduce.main(words) == 2


def test_a_released_model_is_evaluated_in_place_of_training():
    (row,) = reproduce.rows_of("dapo", "released", ())
    names = [stage.name for stage in reproduce.stages(row, 1, ())]
    assert names == ["data", "generate", "score", "report"]
    generate = list(reproduce.stages(row, 1, ()))[1].command
    assert "--model BytedTsinghua-SIA/DAPO-Qwen-32B" in generate and "preset=paper" in generate


def prepared(folder: Path) -> Path:
    """A copy of the repository in which the lab's base model is a tiny one under the name of the real one."""
    copy_of_the_repository(folder)
    base = folder / "outputs/lab/base"
    base_model.build(base, SMALL).rename(base / base_model.BaseRecipe().digest)
    return folder


def typed(folder: Path, *words: str, dry: bool = False) -> subprocess.CompletedProcess:
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if dry:
        environment["DRY_RUN"] = "1"
    return subprocess.run(["bash", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)


def lab_from_data_to_table(folder: Path, recipe: str, *extra: str) -> str:
    done = typed(folder, f"recipes/{recipe}/reproduce.sh", "lab", "--", *extra)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = folder / "outputs" / recipe / "lab-repeated-seed1"
    assert json.loads((run / "manifest.json").read_text())["status"] == "finished"
    assert (folder / "results" / recipe / "lab-repeated-seed1" / "summary.json").exists()
    assert f"{recipe}/lab-repeated" in (folder / "results/README.md").read_text()
    assert f"\n{recipe}, lab-repeated; reported: " in done.stdout and "mean@" in done.stdout.split("here:")[-1]
    return done.stdout


@pytest.mark.timeout(600)
def test_the_lab_goes_from_data_to_table_in_three_steps_and_a_second_call_does_nothing(tmp_path):
    folder = prepared(tmp_path / "copy")
    for recipe in ("grpo", "dapo", "ppo"):
        lab_from_data_to_table(folder, recipe, *SHORT)
    again = typed(folder, "recipes/ppo/reproduce.sh", "lab", dry=True)
    states = re.findall(r"^  (\w+): (done|to do)", again.stdout, re.M)
    assert states == [(name, "done") for name in ("train", "generate", "score", "report", "publish")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_whole_lab_from_data_to_table(tmp_path, recipe):
    lab_from_data_to_table(copy_of_the_repository(tmp_path / "copy"), recipe)
