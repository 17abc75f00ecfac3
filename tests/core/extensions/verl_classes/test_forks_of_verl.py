"""Imports of a user's file from a fork of verl that it lies in."""

from __future__ import annotations

from core.config import compose
from core.config.plugins import load_object
from core.extensions.verl_classes.import_check import problems
from tests.core.config.test_neighbours import write

SCORES = "verl/utils/reward_score"


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


def test_a_project_may_hold_a_clone_of_a_fork(tmp_path):
    scorer = f"verl/{SCORES}/riddles_of_a_clone.py"
    fork = {"verl/verl/__init__.py": "", scorer: "import elms\nx = elms.x\n", "verl/elms.py": "x = 2\n"}
    mine = "from verl.utils.reward_score.riddles_of_a_clone import x\n"
    path = write(tmp_path, {**fork, "setup.py": "", "config/mine.py": mine}) / "config/mine.py"
    assert load_object(f"{path}:x") == 2
    assert problems(compose("grpo", [f"custom_reward_function.path={path}"])) == []
