"""Run scripts and recipe folders: they parse, validate anywhere, write nothing when dry, say where they come from."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from core.config import composition, examine
from results.reporting.run_scripts import read_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "recipes").glob("*/run_*.sh"))
TRAINING = [path for path in SCRIPTS if path.name != "run_retriever.sh"]
REAL = [path for path in TRAINING if path.name == "run_smollm2_135m.sh"]  # on a CPU, in one process
LARGE = [path for path in TRAINING if path.name != "run_lab.sh" and path not in REAL]


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=[f"{path.parent.name}/{path.name}" for path in paths])


def run(path, cwd, *arguments, **variables):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # where there is no .venv
        **{"DRY_RUN": "1", "HOME": str(cwd / "home"), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(cwd / "tmp")},
        **variables,
    }
    return subprocess.run(["bash", str(path), *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def files(folder):
    skipped = (".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")
    return {
        (str(path), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and not set(path.parts) & set(skipped)
    }


@pytest.fixture
def elsewhere(tmp_path):
    """A current folder that is not the repository, with a home of its own."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path


@named(SCRIPTS)
def test_a_script_parses_and_stops_at_its_first_error(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and os.access(path, os.X_OK)
    assert "\nset -euo pipefail\n" in text and '"$@"' in text
    assert path not in LARGE or text.endswith('"$@"\n')  # what is typed comes last


OVER_RAY = "\n  trainer.backend=ray (default local)\n"


@named(SCRIPTS)
def test_a_dry_run_validates_anywhere_and_writes_nothing(path, elsewhere):
    """Over Ray, but for the laptop's model; with no setting in vain; a large one fits on what it asks for."""
    before = files(elsewhere), files(path.parent)
    done = run(path, elsewhere)
    assert done.returncode == 0, done.stderr
    assert "checked at start:" in done.stdout
    assert (files(elsewhere), files(path.parent)) == before
    assert path not in TRAINING or (OVER_RAY in done.stdout) == (path not in REAL)
    if path in LARGE:
        assert "has no effect" not in done.stdout and "\n  The run fits on " in done.stdout


# Scripts of a kind start training by the same line, and each large one ends in "$@"
ONE_A_KIND = list({(path.parent, path in LARGE, path in REAL): path for path in TRAINING}.values())


@named(ONE_A_KIND)
def test_arguments_are_forwarded_and_win(path, elsewhere):
    done = run(path, elsewhere, "trainer.seed=77", "trainer.experiment_name=mine", "trainer.backend=local")
    assert done.returncode == 0 and "trainer.seed=77" in done.stdout
    assert "trainer.experiment_name=mine" in done.stdout and OVER_RAY not in done.stdout


@named(ONE_A_KIND)
def test_a_mistyped_argument_ends_a_script(path, elsewhere):
    done = run(path, elsewhere, "trainer.seed=77", "data.nope=1")
    assert done.returncode == 2 and done.stderr.startswith("data.nope=1: unknown key")


@functools.cache
def values(recipe, *overrides):
    """Key -> value of the composed tree, before nulls are filled in from other keys."""
    return dict(_leaves(composition.tree(composition.read(overrides, recipe))))


MODEL = "actor_rollout_ref.model.path"
NAME = "trainer.experiment_name"  # made of what distinguishes a run, see below


@named(TRAINING)
def test_a_typed_preset_wins_over_the_scripts_keys_and_typed_keys_over_both(path):
    """And of the script's keys it changes those that it names: paths, nodes and memory settings stay."""
    script = read_script(path)
    recipe, own = script.recipe, script.arguments
    scripts = {text.partition("=")[0] for text in own} - {"preset", NAME}
    for file in sorted((ROOT / "recipes" / recipe / "config" / "preset").glob("*.yaml")):
        preset = f"preset={file.stem}"
        presets = {key for key, _ in _leaves(yaml.safe_load(file.read_text()))} - {NAME}
        alone, plain, both = values(recipe, preset), values(recipe, *own), values(recipe, *own, "--", preset)
        assert {key: both[key] for key in presets} == {key: alone[key] for key in presets}
        kept = (scripts - presets) & plain.keys()
        assert {key: both[key] for key in kept} == {key: plain[key] for key in kept}
        typed = examine(recipe, [*own, "--", "trainer.total_training_steps=3000", preset])
        assert not typed.problems and typed.config.trainer.total_training_steps == 3000


def _leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


SEVERAL = [path for path in LARGE if read_script(path).config.trainer.nnodes > 1]


@named(SEVERAL)
def test_a_script_of_several_nodes_names_its_cluster_and_survives_a_loss(path, elsewhere, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    trainer = read_script(path).config.trainer
    assert (trainer.max_restarts, trainer.save_freq, trainer.max_actor_ckpt_to_keep) == (3, 20, 2)
    head = (path.parent / "train.sh").read_text().split("set -euo pipefail")[0]
    assert "RAY_ADDRESS" in path.read_text() and "ray start --head" in head and "ray start --address=" in head
    line = f"trainer.nnodes={trainer.nnodes}: needs a Ray cluster, and neither RAY_ADDRESS nor"
    dry = run(path, elsewhere)
    assert dry.returncode == 0 and f"\n  cluster: {line}" in dry.stdout
    files = [f"data.{kind}_files={ROOT / 'README.md'}" for kind in ("train", "val")]
    refused = run(path, elsewhere, *files, DRY_RUN="")
    assert refused.returncode == 2 and line in refused.stderr and not list(elsewhere.glob("outputs"))
    assert f"cluster: {line}" not in run(path, elsewhere, "trainer.nnodes=1").stdout
