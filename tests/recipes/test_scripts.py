"""Run scripts and recipe folders: they parse, validate anywhere, write nothing when dry, say where
they come from."""

from __future__ import annotations

import functools
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from core.config import convert
from core.config.composition import examine
from results.reporting.run_scripts import PRINT_WORDS, read_script

ROOT = Path(__file__).resolve().parents[2]
OVER_RAY = "\n  trainer.backend=ray (default local)\n"


def scripts() -> list[Path]:
    return sorted((ROOT / "recipes").glob("*/run_*.sh"))


def training() -> list[Path]:
    return [path for path in scripts() if path.name != "run_retriever.sh"]


def is_real(path: Path) -> bool:
    return path.name == "run_smollm2_135m.sh"  # on a CPU, in one process


def is_large(path: Path) -> bool:
    return path.name not in ("run_lab.sh", "run_retriever.sh") and not is_real(path)


def one_a_kind() -> list[Path]:
    """Scripts of a kind start training by the same line, and each large one ends in "$@"."""
    return list(
        {(path.parent, is_large(path), is_real(path)): path for path in training()}.values()
    )


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A current folder that is not the repository, with a home of its own."""
    for name in ("home", "tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def run(elsewhere, monkeypatch, capsys):
    """Run a script up to its Python, and that in this process; return the exit status, stdout and
    stderr."""

    def started(path: Path, *arguments: str) -> tuple[int, str, str]:
        shell = ["bash", "-c", PRINT_WORDS, str(path), *arguments]
        done = subprocess.run(
            shell, env=os.environ | {"DRY_RUN": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        _, dash_m, module, *words = done.stdout.split("\0")[:-1]
        assert dash_m == "-m"
        monkeypatch.setattr(sys, "argv", [module, *words])
        monkeypatch.delitem(sys.modules, module, raising=False)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        return end.value.code or 0, *capsys.readouterr()

    return started


def test_a_script_parses_and_stops_at_its_first_error(subtests):
    for path in scripts():
        with subtests.test(named(path)):
            assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
            text = path.read_text()
            assert text.startswith("#!/usr/bin/env bash\n") and os.access(path, os.X_OK)
            assert "\nset -euo pipefail\n" in text and '"$@"' in text
            assert not is_large(path) or text.endswith('"$@"\n')  # what is typed comes last


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_any_script():
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith((".", "outputs"))
    ]
    found = [
        path for folder in folders for kind in ("*.sh", "*.sbatch") for path in folder.rglob(kind)
    ]
    assert len(found) > 50
    command = ["shellcheck", *map(str, found), str(ROOT / ".ci" / "run")]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_a_dry_run_validates_anywhere_and_writes_nothing(run, elsewhere, subtests):
    """Over Ray, but for the laptop's model; with no setting in vain; a large one fits on what it
    asks for."""
    before = sorted(elsewhere.rglob("*"))
    for path in training():
        with subtests.test(named(path)):
            status, out, error = run(path)
            assert status == 0, error
            assert "not checked here:" in out and (OVER_RAY in out) == (not is_real(path))
            if is_large(path):
                assert "has no effect" not in out and "\n  The run fits on " in out
    assert sorted(elsewhere.rglob("*")) == before


def test_arguments_are_forwarded_and_win_and_a_mistyped_one_ends_a_script(run, subtests):
    for path in one_a_kind():
        with subtests.test(named(path)):
            alone = ("trainer.backend=local", "trainer.nnodes=1", "trainer.n_gpus_per_node=1")
            status, out, _ = run(path, "trainer.seed=77", "trainer.experiment_name=mine", *alone)
            assert status == 0 and "trainer.seed=77" in out
            assert "trainer.experiment_name=mine" in out and OVER_RAY not in out
            status, _, error = run(path, "trainer.seed=77", "data.nope=1")
            assert status == 2 and error.startswith("data.nope=1: unknown key")


@functools.cache
def values(recipe, *overrides):
    """Key -> value, of the user's own mappings each entry."""
    config = examine(recipe, overrides).config
    return dict(_leaves(convert.as_tree(config)))


NAME = "trainer.experiment_name"


@pytest.mark.parametrize("kind", [*("dapo", "grpo", "ppo", "search_r1", "sft")])
def test_a_typed_preset_wins_over_the_scripts_keys_and_typed_keys_over_both(kind, subtests):
    """And of the script's keys it changes those that it names: paths, nodes and memory settings
    stay."""
    for path in one_a_kind():
        if path.parent.name == kind:
            with subtests.test(named(path)):
                check_presets(path)


def check_presets(path: Path) -> None:
    script = read_script(path)
    recipe, own = script.recipe, script.arguments
    scripts = {text.partition("=")[0] for text in own} - {"preset", NAME}
    for file in sorted((ROOT / "recipes" / recipe / "config" / "preset").glob("*.yaml")):
        preset = f"preset={file.stem}"
        presets = {key for key, _ in _leaves(yaml.safe_load(file.read_text()))} - {NAME}
        alone, plain, both = (
            values(recipe, preset),
            values(recipe, *own),
            values(recipe, *own, "--", preset),
        )
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


def test_a_script_of_several_nodes_names_its_cluster_and_survives_a_loss(run, subtests):
    several = {path: read_script(path).config.trainer for path in training() if is_large(path)}
    several = {path: trainer for path, trainer in several.items() if trainer.nnodes > 1}
    assert several
    for path, trainer in several.items():
        with subtests.test(named(path)):
            assert (trainer.max_restarts, trainer.save_freq, trainer.max_actor_ckpt_to_keep) == (
                3,
                20,
                2,
            )
            head = (path.parent / "train.sh").read_text().split("set -euo pipefail")[0]
            assert (
                "RAY_ADDRESS" in path.read_text()
                and "ray start --head" in head
                and "ray start --address=" in head
            )
            line = (
                f"trainer.nnodes={trainer.nnodes}: needs a Ray cluster, and neither RAY_ADDRESS nor"
            )
            status, out, _ = run(path)
            assert status == 0 and f"\n  cluster: {line}" in out
            assert f"cluster: {line}" not in run(path, "trainer.nnodes=1")[1]


@pytest.mark.parametrize("recipe", ["sft", "grpo", "ppo", "dapo", "search_r1"])
def test_a_killed_run_of_the_real_model_loses_ten_steps_at_most(recipe):
    for task in {"grpo": ("", "naive", "passages"), "sft": ("", "search")}.get(recipe, ("",)):
        script = read_script(
            ROOT / "recipes" / recipe / "run_smollm2_135m.sh", tuple(filter(None, [task]))
        )
        assert 0 < script.config.trainer.save_freq <= 10, task


def test_without_its_cluster_a_script_is_refused_before_it_starts(run, elsewhere, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "")
    files = [f"data.{kind}_files={ROOT / 'README.md'}" for kind in ("train", "val")]
    status, _, error = run(ROOT / "recipes/dapo/run_qwen2.5_32b.sh", *files)
    assert status == 2 and "needs a Ray cluster, and neither RAY_ADDRESS nor" in error
    assert not list(elsewhere.glob("work/*"))
