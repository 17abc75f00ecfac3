"""The structure of the repository: which package may import which, and where heavy packages are
imported.

Paths and commands that documents name are compared with the code by slow tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Which top-level package may import which others.
TOP_LEVEL = {
    "recipes": ("results", "data_preprocess", "core", "reward_scores"),
    "results": ("core", "reward_scores"),
    "data_preprocess": ("core", "reward_scores"),
    "core": ("reward_scores",),
    "reward_scores": (),
}

# The layers of core, the top one first. A package or file imports from the layers below it and, as
# long as no circle arises, from its own layer. A name is that of a package or of a file at the top
# of core.
LAYERS = (
    ("__init__",),
    ("python_api",),
    ("command_line", "ray_trainer", "plan", "plan_time", "export", "evaluate", "answers"),
    ("trainer",),
    ("run",),
    ("cluster", "rollout", "trace"),
    ("engines", "rewards"),
    ("learner",),
    ("algorithm", "checkpoint", "data", "tracking"),
    ("vision",),
    ("config",),
    ("types", "errors", "files", "model_shapes", "secret_keys", "dry_run", "graceful_stop"),
)
# Packages that only these files import.
IMPORTED_ONLY_BY = {
    "ray": ("core/cluster/ray_*.py", "recipes/launch/rehearse.py"),
    "vllm": ("core/engines/vllm*.py", "core/vision/vllm_*.py"),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Return dotted name -> file of every module that is no test."""
    found = (path for package in TOP_LEVEL for path in (ROOT / package).rglob("*.py"))
    return {module_of(path): path for path in sorted(found)}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Return every dotted name that the file imports, inside functions and TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, (
                f"{relative(path)}: a relative import, which this test does not read"
            )
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imported_modules(path: Path) -> set[str]:
    """Return the modules of this repository that the file imports, without itself."""
    imported = {
        name if name in modules() else name.rpartition(".")[0] for name in imported_names(path)
    }
    return (imported & modules().keys()) - {module_of(path)}


def package_of(module: str) -> str:
    return module.partition(".")[0]


def unit_of(module: str) -> str:
    """Return the name in LAYERS of a module of core: its package, or the file at the top of
    core."""
    return module.split(".")[1] if "." in module else "__init__"


def kernel_imports() -> dict[str, set[str]]:
    """Return what each module of core imports of core."""
    kernel = {module for module in modules() if package_of(module) == "core"}
    return {module: imported_modules(modules()[module]) & kernel for module in kernel}


def test_imports_between_packages_run_downwards():
    upwards = [
        f"{name} imports {module}"
        for name, path in modules().items()
        for module in sorted(imported_modules(path))
        if package_of(module) not in (package_of(name), *TOP_LEVEL[package_of(name)])
    ]
    assert not upwards


def test_imports_inside_core_run_downwards():
    layer_of = {unit: number for number, units in enumerate(LAYERS) for unit in units}
    assert {unit_of(module) for module in kernel_imports()} == layer_of.keys()
    upwards = [
        f"{module} imports {one}"
        for module, imported in kernel_imports().items()
        for one in sorted(imported)
        if layer_of[unit_of(one)] < layer_of[unit_of(module)]
    ]
    assert not upwards


def test_no_circle_of_packages_or_files_in_core():
    above = defaultdict(set)
    for module, imported in kernel_imports().items():
        above[unit_of(module)] |= {unit_of(one) for one in imported} - {unit_of(module)}
    TopologicalSorter(above).prepare()  # raises CycleError, which names the circle
    TopologicalSorter(kernel_imports()).prepare()


def test_a_recipe_imports_no_other_recipe_except_the_lab():
    crossing = [
        f"{relative(path)} imports {module}"
        for path in modules().values()
        if (recipe := relative(path).split("/"))[0] == "recipes"
        for module in sorted(imported_modules(path))
        if module.startswith("recipes.") and module.split(".")[1] not in (recipe[1], "lab")
    ]
    assert not crossing


def test_ray_and_vllm_are_imported_by_few_files():
    for package, allowed in IMPORTED_ONLY_BY.items():
        importing = [
            relative(path)
            for path in modules().values()
            if package in map(package_of, imported_names(path))
        ]
        assert importing and all(
            any(fnmatch(name, one) for one in allowed) for name in importing
        ), importing


def test_composing_scoring_and_reporting_load_no_heavy_package():
    program = """
import sys
from core import plan
from core.config.composition import compose
from reward_scores import SCORERS
import core.data.prompts, core.rewards, results.reporting.run_report
compose('grpo', ['actor_rollout_ref.rollout.n=4'])
SCORERS['openai/gsm8k']('#### 4', '4', {})
plan.main(['grpo', 'actor_rollout_ref.model.path=Qwen/Qwen2.5-7B'])
print([n for n in ('torch', 'ray', 'vllm', 'transformers', 'wandb') if n in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


STARTS = "|".join([*TOP_LEVEL, "tests"])


@pytest.mark.slow
def test_what_documents_name_exists():
    """Paths and commands of this repository that documents and scripts name; ``*`` and ``<recipe>``
    stand for any."""
    missing, patterns = (
        [],
        ("*.md", "core/**/*.md", "recipes/**/*.md", "tests/commands/*.md", "recipes/**/*.sh"),
    )
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(rf"(?<![\w./-])((?:{STARTS})/[\w./*<>-]*[\w*/>])", text):
            pattern = re.sub(r"<[^>]*>", "*", name).rstrip("/")
            if not any(ROOT.glob(pattern)) and not any(ROOT.glob(f"{pattern}.*")):
                missing.append(f"{relative(path)}: {name}")
        for name in re.findall(rf"-m ((?:{STARTS})\.\w+(?:\.\w+)*)", text):
            module = ROOT / name.replace(".", "/")
            if not any(map(Path.exists, (module.with_suffix(".py"), module / "__main__.py"))):
                missing.append(f"{relative(path)}: {name}")
    assert not missing


def test_every_table_of_a_document_has_its_heading():
    for path in (path for top in TOP_LEVEL for path in ROOT.glob(f"{top}/**/*.md")):
        above = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.fullmatch(r"\|(\s*:?-{3,}:?\s*\|)+", line):
                assert above.startswith("|"), f"{relative(path)}:{number}"
            above = line
