"""Imports of a user's file from its own project, and from a fork of verl that it lies in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from core.config import compose
from core.config.plugins import load_object
from core.extensions.verl_classes.import_check import problems

SCORES = "verl/utils/reward_score"


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_file_imports_what_lies_beside_and_above_it_up_to_the_root_of_its_project(tmp_path, capsys):
    mine = "import one_beside\nfrom ..own_package.part import above\nx = (one_beside.y, above)\n"
    project = write(
        tmp_path / "project",
        {
            "setup.py": "",
            "own_package/part.py": "above = 2\n",
            "rewards/one_beside.py": "y = 1\n",
            "rewards/mine.py": mine,
            "rewards/other.py": "import outside_of_it\n",
            "../outside_of_it.py": "",
        },
    )
    assert load_object(f"{project}/rewards/mine.py:x") == (1, 2)
    assert f"imports one_beside from {project}/rewards" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="outside_of_it"):
        load_object(f"{project}/rewards/other.py:x")


def test_no_import_of_another_file_is_answered_by_a_users_project(tmp_path):
    mine = "def find():\n    import a_name_of_mine\n    return a_name_of_mine.y\n"
    write(tmp_path, {"setup.py": "", "a_name_of_mine.py": "y = 1\n", "mine.py": mine})
    find = load_object(f"{tmp_path}/mine.py:find")
    with pytest.raises(ModuleNotFoundError):
        import a_name_of_mine  # noqa: F401
    assert find() == 1


def test_a_folder_of_runs_with_the_name_of_a_package_is_none(tmp_path):
    mine = "try:\n    import a_logger\nexcept ImportError:\n    a_logger = None\n"
    write(tmp_path, {"setup.py": "", "a_logger/run-1/files/code.py": "", "mine.py": mine})
    assert load_object(f"{tmp_path}/mine.py:a_logger") is None


def test_a_file_in_a_fork_of_verl_imports_the_forks_own_modules_and_names(tmp_path):
    mine = (
        "from verl.utils.reward_score import gsm8k, puzzles\n"
        "from verl.utils.reward_score.gsm8k import strip\n"
        "scorer = gsm8k.compute_score\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    from verl.utils.reward_score.puzzles import solve\n"
        "    return float(solve(strip(solution_str)) == ground_truth)\n"
    )
    fork = {
        "setup.py": "",
        "verl/__init__.py": "raise RuntimeError('the whole package')\n",
        f"{SCORES}/puzzles.py": "from .gsm8k import strip\ndef solve(text):\n    return strip(text)[::-1]\n",
        f"{SCORES}/gsm8k.py": "def strip(text):\n    return text.strip()\n",
        "recipe/mine.py": mine,
    }
    path = write(tmp_path, fork) / "recipe/mine.py"
    assert load_object(f"{path}:compute_score")(" ab ", "ba") == 1.0
    assert load_object(f"{path}:scorer").__module__ == "core.extensions.verl_classes.reward_score"
    assert problems(compose("grpo", [f"custom_reward_function.path={path}"])) == []


def test_what_a_fork_has_and_this_repository_does_not_is_refused_all_the_same(tmp_path):
    trainer, mine = "verl/trainer/ppo/ray_trainer.py", "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n"
    path = write(tmp_path, {"setup.py": "", "verl/__init__.py": "", trainer: "", "mine.py": mine}) / "mine.py"
    (problem,) = problems(compose("grpo", [f"custom_reward_function.path={path}"]))
    assert "verl.trainer.ppo.ray_trainer is not part of the stand-in" in problem and "recipes here replace" in problem
