"""What the README and the design promise about the shape of the code."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from core.config.defaults import table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = [
    path
    for folder in ("core", "recipes", "reward_scores", "data_preprocess", "results")
    for path in (ROOT / folder).rglob("*.py")
]


def imports(path: Path) -> set[str]:
    """Top-level packages that the file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_fit_fits_on_a_screen():
    (length,) = [size for name, size in functions(ROOT / "core/ray_trainer.py") if name == "fit"]
    assert length <= 40


def test_no_function_is_longer_than_a_screen():
    long = [f"{path.relative_to(ROOT)}:{name} {size}" for path in PYTHON for name, size in functions(path) if size > 60]
    assert not long


def test_core_knows_no_recipe():
    assert not [path for path in PYTHON if path.is_relative_to(ROOT / "core") and "recipes" in imports(path)]


def test_ray_and_vllm_each_have_one_door():
    over_ray = {f"core/cluster/ray_{name}.py" for name in ("pools", "watch", "engine", "workers", "driver")}
    for package, doors in (("ray", over_ray), ("vllm", {"core/engines/vllm.py"})):
        assert {str(path.relative_to(ROOT)) for path in PYTHON if package in imports(path)} <= doors


@pytest.mark.parametrize(
    "program",
    [
        "from core.config import compose; compose('grpo', ['actor_rollout_ref.rollout.n=4'])",
        "from reward_scores import SCORERS; SCORERS['openai/gsm8k']('#### 4', '4', {})",
        "import core.rewards, results.reporting.run_report, results.reporting.study_report",
        "from core.planning import estimate; estimate.main(['grpo', 'actor_rollout_ref.model.path=Qwen/Qwen2.5-7B'])",
    ],
)
def test_composing_scoring_and_reporting_load_no_heavy_package(program):
    check = "import sys; print([n for n in ('torch', 'ray', 'vllm', 'transformers', 'wandb') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{check}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_readme_is_short_and_its_table_of_defaults_is_the_codes():
    assert len(README.splitlines()) < 250
    between = README.partition("<!-- defaults:begin -->\n")[2].partition("<!-- defaults:end -->")[0]
    assert between.strip() == table()
