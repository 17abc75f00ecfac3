"""The structure of the repository: which package may import which, and where heavy packages are imported.

Paths and commands that documents name are compared with the code by slow tests, so that a change of the
code needs no edit of a document to pass (tests/test_generated_pages.py has the tables).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
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

# The layers of core, the top one first. A package or file imports from the layers below it and, as long as no circle
# arises, from its own layer. A name is that of a package or of a file at the top of core.
LAYERS = (
    ("command_line", "ray_trainer", "plan", "export", "evaluate", "answers"),
    ("run",),
    ("cluster", "rollout", "trace"),
    ("engines", "rewards"),
    ("learner", "tracking"),
    ("algorithm", "checkpoint", "data"),
    ("vision",),
    ("config",),
    ("types", "errors", "files", "__init__"),
)
# Commands at the top of core that belong to an extension.
COMMANDS = ("plan", "evaluate")

# Packages that only these files import.
IMPORTED_ONLY_BY = {
    "ray": ("core/cluster/ray_*.py",),
    "vllm": ("core/engines/vllm*.py", "core/vision/vllm_*.py"),
}

# -- reading the code ----------------------------------------------------------------------------


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
def imported_names(path: Path, typing: bool = True) -> frozenset[str]:
    """Return every dotted name that the file imports, inside functions too; ``typing``: under TYPE_CHECKING as well."""
    found, unread = set(), set()
    for node in ast.walk(tree(path)):
        if not typing and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unread |= {one for part in node.body for one in ast.walk(part)}
    for node in ast.walk(tree(path)):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{relative(path)}: a relative import, which this test does not read"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def imported_modules(path: Path, typing: bool = True) -> set[str]:
    """Return the modules of this repository that the file imports, without itself."""
    found = {name if name in modules() else name.rpartition(".")[0] for name in imported_names(path, typing)}
    return (found & modules().keys()) - {module_of(path)}


def package_of(module: str) -> str:
    return module.partition(".")[0]


def unit_of(module: str) -> str:
    """Return the name in LAYERS of a module of core: its package, or the file at the top of core."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
def kernel() -> frozenset[str]:
    return frozenset(module for module in modules() if package_of(module) == "core")


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


# -- the directions of imports -------------------------------------------------------------------


def test_imports_between_packages_run_downwards():
    upwards = [
        f"{name} imports {module}"
        for name, path in modules().items()
        for module in sorted(imported_modules(path))
        if package_of(module) not in (package_of(name), *TOP_LEVEL[package_of(name)])
    ]
    assert not upwards


def kernel_imports(module: str, typing: bool = True) -> set[str]:
    return {one for one in imported_modules(modules()[module], typing) if one in kernel()}


def test_imports_inside_the_kernel_run_downwards():
    layer_of = {unit: number for number, units in enumerate(LAYERS) for unit in units}
    upwards = [
        f"{module} imports {one}"
        for module in kernel()
        for one in sorted(kernel_imports(module))
        if layer_of[unit_of(one)] < layer_of[unit_of(module)]
    ]
    assert not upwards


def test_every_part_of_the_kernel_has_a_layer():
    assert {unit_of(module) for module in kernel()} == {unit for units in LAYERS for unit in units}


def test_no_circle_of_packages_in_the_kernel():
    above = defaultdict(set)
    for module in kernel():
        above[unit_of(module)] |= {unit_of(one) for one in kernel_imports(module)}
    assert not circle({unit: below - {unit} for unit, below in above.items()})


def test_no_circle_of_files_in_the_kernel():
    assert not circle({module: kernel_imports(module, typing=False) for module in kernel()})


def circle(graph: dict[str, set[str]]) -> str:
    """Return one circle of the graph as text, or nothing where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return ""


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
        importing = [relative(path) for path in modules().values() if package in map(package_of, imported_names(path))]
        assert importing and all(any(fnmatch(name, one) for one in allowed) for name in importing), importing


def test_composing_scoring_and_reporting_load_no_heavy_package():
    program = """
import sys
from core import plan
from core.config import compose
from reward_scores import SCORERS
import core.data.prompts, core.rewards, results.reporting.run_report
compose('grpo', ['actor_rollout_ref.rollout.n=4'])
SCORERS['openai/gsm8k']('#### 4', '4', {})
plan.main(['grpo', 'actor_rollout_ref.model.path=Qwen/Qwen2.5-7B'])
print([n for n in ('torch', 'ray', 'vllm', 'transformers', 'wandb') if n in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


# -- names ---------------------------------------------------------------------------------------


def test_no_two_classes_and_no_two_files_of_core_share_a_name():
    places = defaultdict(list)
    for path in map(modules().get, kernel()):
        if path:
            classes = [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
            # A section's file bears the section's name; each extension has an extension.py.
            shared = path.parent.name == "sections" or path.name in ("__init__.py", "extension.py", "keys.py")
            for name in [*classes, *([] if shared else [path.name])]:
                places[name].append(relative(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


# -- documents -----------------------------------------------------------------------------------


def documentation(path: Path) -> str:
    """Return the text that people read: a whole document, or the docstrings and comments of a program."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    nodes = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return "\n".join([*filter(None, map(ast.get_docstring, nodes)), *re.findall(r"#.*", text)])


def documented() -> list[Path]:
    # The cross-check keeps the packages that it compares with in an environment below its folder.
    tests = sorted(path for path in (ROOT / "tests").rglob("*.py") if ".venv" not in path.parts)
    patterns = ("*.md", "core/**/*.md", "recipes/**/*.md", "tests/commands/*.md", "recipes/**/*.sh")
    texts = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [*texts, *modules().values(), *tests]


STARTS = "|".join([*TOP_LEVEL, "tests"])


@pytest.mark.slow
def test_what_documents_name_exists():
    """Paths and commands of this repository that documents and comments name; ``*`` and ``<recipe>`` stand for any."""
    missing = []
    for path in documented():
        text = documentation(path)
        for name in re.findall(rf"(?<![\w./-])((?:{STARTS})/[\w./*<>-]*[\w*/>])", text):
            pattern = re.sub(r"<[^>]*>", "*", name).rstrip("/")
            if not any(ROOT.glob(pattern)) and not any(ROOT.glob(f"{pattern}.*")):
                missing.append(f"{relative(path)}: {name}")
        for name in re.findall(rf"-m ((?:{STARTS})\.\w+(?:\.\w+)*)", text):
            module = ROOT / name.replace(".", "/")
            if not any(map(Path.exists, (module.with_suffix(".py"), module / "__main__.py"))):
                missing.append(f"{relative(path)}: {name}")
    assert not missing


@pytest.mark.slow
def test_no_document_outside_of_the_repository_is_cited():
    names = ("DESIGN", "LAYOUT.md", "STYLE.md", "gaps.md", "scale.md", "shared/", "facts/")
    invariants = re.compile(r"\bI(?:[1-9]|1[0-5])\b")
    cited = [
        f"{relative(path)}: {found}"
        for path in documented()
        if path != Path(__file__)
        for found in [*filter(documentation(path).__contains__, names), *invariants.findall(documentation(path))]
    ]
    assert not cited


@pytest.mark.slow
def test_each_invariant_names_tests_that_exist():
    invariants = (ROOT / "core/README.md").read_text(encoding="utf-8").partition("## Invariants")[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", invariants)
    assert len(named) >= 15
    absent = [f"{file}::{name}" for file, name in named if name not in dict(functions(ROOT / file))]
    assert not absent
