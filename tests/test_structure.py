"""The structure of the repository: who may import whom, how long things may be, and what the documents show of it.

The tables at the top are the rules and, at the same time, their documentation: core/README.md and core/config/README.md
show them between markers. ``python -m tests.test_structure`` writes what stands between the markers anew.
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

from core import MOVED
from core.config import CHANGED_DEFAULTS, peer_names, verl_keys

ROOT = Path(__file__).resolve().parent.parent

# Which top-level package may import which others.
TOP_LEVEL = {
    "recipes": ("results", "data_preprocess", "core", "reward_scores"),
    "results": ("core", "reward_scores"),
    "data_preprocess": ("core", "reward_scores"),
    "core": ("reward_scores",),
    "reward_scores": (),
}

# The floors of core, the top one first. A package or file imports from the floors below it and, as long as no circle
# arises, from its own floor. A name is that of a package or of a file at the top of core.
FLOORS = (
    {
        "launch": "runs what a `main_<recipe>.py` names: configuration, trainer, `fit`",
        "command_line": "arguments to a checked configuration; what a start and `DRY_RUN=1` print",
        "ray_trainer": "the loop, its hooks and validation",
        "plan": "`python -m core.plan`: memory, time and disk of a run before it starts",
        "export": "`python -m core.export`: a checkpoint as a Hugging Face folder",
        "evaluate": "`python -m core.evaluate`: answers, their scores and a report, without training",
        "evaluation": "what `core.evaluate` does: an engine alone, files of answers, scores, estimates",
        "replay": "`python -m core.replay`: computes a kept step again, compares, or asks what if",
        "report": "an old command; it prints its new name",
    },
    {"session": "starts, resumes, records, saves and stops a run"},
    {
        "cluster": "where the phases run: in this process, on FSDP ranks, in Ray actors",
        "rollout": "collects groups; plays episodes of several turns, with tools",
    },
    {
        "engines": "token ids in, token ids out: transformers, vLLM or SGLang",
        "rewards": "from a trajectory to a score, in this process or in graders that can be killed",
    },
    {
        "learner": "batches, log-probs, updates: everything that runs a transformers model",
        "tracking": "what a run records, measures and watches",
    },
    {
        "algorithm": "the formulas: advantages, losses, KL, importance weights, schedules",
        "checkpoint": "what is saved, and how it survives a kill",
        "data": "parquet files to prompts, by ordinal",
        "planning": "what a run will need",
    },
    {"config": "schema, composition, checks, advice on the keys of other versions"},
    {
        "types": "the values that flow through the loop, and the alignment rule",
        "errors": "the errors that callers tell apart",
        "remote": "files behind URLs: their drivers, and copies of them, made once a node",
        "installation": "what to type where packages are missing",
        "__init__": "the commands that have moved",
    },
)

# Lines of Python at commit 7617d1a, when the files lay flat in core; files are counted where they went.
LINES_BEFORE = {
    **{"launch": 114, "command_line": 111, "ray_trainer": 222, "session": 465, "cluster": 1935, "rollout": 937},
    **{"engines": 1602, "rewards": 1828, "learner": 1736, "tracking": 1259, "algorithm": 1113, "checkpoint": 929},
    **{"data": 962, "planning": 684, "config": 3261, "types": 298},
}
LINES_BEFORE_ELSEWHERE = {"results/reporting": 1997, "tests/scripted_engine.py": 238}

READING_PATH = (  # what one reads to understand a step
    *("core/ray_trainer.py", "core/session.py", "core/types.py", "core/algorithm", "core/rollout/collect.py"),
    *("core/learner/batching.py", "core/learner/learner.py", "core/cluster/workers.py"),
)
# Lines of Python at most. Who needs more raises the number here and writes the reason beside it.
BUDGETS = {
    # 4,600 more than the redesign: evaluation (1,100), help, identity of runs, plans, loggers; batches without padding
    # (200), places on a cluster (200), bytes over Ray, weights in buckets with their proof (500), files by owner (100),
    # checkpoints that are written beside training (150), offloading between phases (50), runs that train on files (70),
    # a judge behind a URL (850), records of tokens (500), agents: loops by name, call formats, simulated users (560),
    # steps that are kept and computed again (1,270), files behind URLs (400), run folders written through to one (350),
    # four losses, two estimators and what they read (340), pictures in prompts (870), invariants of a step (400),
    # layers that ranks share, their plans and rules (200), a reward model that ranks share (130),
    # a prompt that is read once within a pass (150),
    # SGLang: its server's process and requests (290), its engine (350), what the table of engines knows of it (60),
    # MLPs and norms that are compiled (60), examples that are kept for the runs of a process (20)
    ("core",): 27_480,
    # 960 more: help.py, a role for every key, references, names of other projects, odd values, URLs, shared layers,
    # what engines cannot promise, a reward model's pool
    ("core/config",): 3_410,
    # 840 more: a judge's prompt, verdict in bounded time, requests, canaries; managers by a decorator's name
    ("core/rewards",): 2_340,
    # 380 more: the hash of the base weights, what a resume may change, writing beside training, and through to a URL
    ("core/checkpoint",): 1_330,
    # 780 more: first lines, memory knobs, the whole step, a sharded update as counted, what rests by phase, no engine,
    # models that read pictures, layers that ranks share, a reward model's own GPUs
    ("core/planning",): 1_400,
    # 450 more: bars while a step collects, the identity of a run, batches without padding, snapshots, traces, URLs,
    # pictures; 270 for the losses and estimators of 2025 and 2026; 380 for the invariants
    READING_PATH: 4_050,
    ("recipes/ppo",): 600,
    ("recipes/grpo",): 600,
    ("recipes/dapo",): 600,
    # 140 more than designed: its keys, the knowledge task of its lab, which moved here, and --help of its commands
    (
        "recipes/search_r1",
    ): 3_150,  # 350 more than designed: its keys, the knowledge task, flat search over several servers
    ("recipes/sft",): 650,  # 50 more than designed: three forms of data, each with what is refused of it
    # 320 more than designed: questions about pictures; 500: two families of tasks with room, and what they tell apart;
    # 50: the seeds after one that did not learn, an estimator that a claim compares GRPO with
    ("recipes/lab",): 2_300,  # no paper: tasks and base models of the laptop runs, and the tour of a prompt
}
FILES_AT_THE_TOP_OF_CORE = 12
LINES_OF_A_FUNCTION = 60
LINES_OF_FIT = 40
LINES_OF_THE_README = 150

# Packages that only these files import.
IMPORTED_ONLY_BY = {
    **{"ray": "core/cluster/ray_*.py", "vllm": "core/engines/vllm*.py"},
    "openai": "core/rewards/judge_client.py",
}

MARKDOWN = [
    path
    for pattern in ("*.md", "core/**/*.md", "recipes/**/*.md", "tests/commands/*.md")
    for path in sorted(ROOT.glob(pattern))
]
PYTHON = sorted(path for package in TOP_LEVEL for path in (ROOT / package).rglob("*.py"))


# -- reading the code ----------------------------------------------------------------------------


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PYTHON}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Return every dotted name that the file imports: inside functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{relative(path)}: a relative import, which this test does not read"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def imported_modules(path: Path) -> set[str]:
    """Return the modules of this repository that the file imports, without itself."""
    found = {name if name in MODULES else name.rpartition(".")[0] for name in imported_names(path)}
    return (found & MODULES.keys()) - {module_of(path)}


def package_of(module: str) -> str:
    return module.partition(".")[0]


def unit_of(module: str) -> str:
    """Return the name in FLOORS of a module of core: its package, or the file at the top of core."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def lines(*places: str) -> int:
    """Return the lines of Python in these files and folders, as ``wc -l`` counts them."""
    files = [
        path for place in places for path in ((ROOT / place).rglob("*.py") if "." not in place else [ROOT / place])
    ]
    return sum(path.read_bytes().count(b"\n") for path in files)


# -- the directions of imports -------------------------------------------------------------------


@pytest.mark.parametrize("package", TOP_LEVEL)
def test_imports_between_packages_run_downwards(package):
    upwards = [
        f"{relative(path)} imports {module}"
        for path in PYTHON
        if package_of(module_of(path)) == package
        for module in sorted(imported_modules(path))
        if package_of(module) not in (package, *TOP_LEVEL[package])
    ]
    assert not upwards


def test_imports_inside_core_run_downwards():
    floor_of = {unit: number for number, units in enumerate(FLOORS) for unit in units}
    upwards = [
        f"{relative(path)} imports {module}"
        for path in PYTHON
        if package_of(module_of(path)) == "core"
        for module in sorted(imported_modules(path))
        if package_of(module) == "core" and floor_of[unit_of(module)] < floor_of[unit_of(module_of(path))]
    ]
    assert not upwards


def test_every_part_of_core_has_a_floor():
    parts = {unit_of(module) for module in MODULES if package_of(module) == "core"}
    assert parts == {unit for units in FLOORS for unit in units}


def test_no_circle_of_packages_in_core():
    above = defaultdict(set)
    for module, path in MODULES.items():
        if package_of(module) == "core":
            above[unit_of(module)] |= {unit_of(each) for each in imported_modules(path) if package_of(each) == "core"}
    assert not circle({unit: below - {unit} for unit, below in above.items()})


def test_no_circle_of_files():
    assert not circle({module: imported_modules(path) for module, path in MODULES.items()})


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
        for path in PYTHON
        if (recipe := relative(path).split("/"))[0] == "recipes"
        for module in sorted(imported_modules(path))
        if module.startswith("recipes.") and module.split(".")[1] not in (recipe[1], "lab")
    ]
    assert not crossing


@pytest.mark.parametrize("package", IMPORTED_ONLY_BY)
def test_ray_and_vllm_are_imported_by_few_files(package):
    importing = [relative(path) for path in PYTHON if package in map(package_of, imported_names(path))]
    assert importing and all(fnmatch(name, IMPORTED_ONLY_BY[package]) for name in importing), importing


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


# -- names and sizes -----------------------------------------------------------------------------


def test_the_top_of_core_holds_few_files():
    assert len(list((ROOT / "core").glob("*.py"))) <= FILES_AT_THE_TOP_OF_CORE


def test_no_two_classes_and_no_two_files_of_core_share_a_name():
    places = defaultdict(list)
    for path in PYTHON:
        if package_of(module_of(path)) == "core":
            classes = [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
            for name in [*classes, *([path.name] if path.name != "__init__.py" else [])]:
                places[name].append(relative(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("places", BUDGETS, ids=lambda places: places[0] if len(places) == 1 else "the reading path")
def test_a_package_stays_within_its_budget(places):
    assert lines(*places) <= BUDGETS[places]


def test_every_recipe_has_a_budget():
    recipes = {relative(path) for path in (ROOT / "recipes").iterdir() if (path / "__init__.py").exists()}
    assert recipes <= {place for places in BUDGETS for place in places}


def test_fit_fits_on_a_screen():
    (length,) = [size for name, size in functions(ROOT / "core/ray_trainer.py") if name == "fit"]
    assert length <= LINES_OF_FIT


def test_no_function_is_longer_than_a_screen():
    sizes = [(relative(path), name, size) for path in PYTHON for name, size in functions(path)]
    assert not [each for each in sizes if each[2] > LINES_OF_A_FUNCTION]


# -- documents -----------------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LINES_OF_THE_README


def defaults_table() -> str:
    """The table of changed defaults."""
    shown = [(d.key, *("null" if one is None else one for one in (d.verl, d.here)), d.why) for d in CHANGED_DEFAULTS]
    rows = [f"| `{key}` | `{verl}` | `{here}` | {why} |" for key, verl, here, why in shown]
    return "\n".join(["| key | verl | here | why |", "|---|---|---|---|", *rows])


def top_level_table() -> str:
    rows = [f"| `{package}` | {', '.join(f'`{each}`' for each in below)} |" for package, below in TOP_LEVEL.items()]
    return "\n".join(["| package | may import |", "|---|---|", *rows])


def lines_table() -> str:
    """Return the floors of core, with the lines of each part at commit 7617d1a and now."""
    rows, total = [], 0
    for number, units in zip(range(len(FLOORS), 0, -1), FLOORS, strict=True):
        for unit, phrase in units.items():
            folder = (ROOT / "core" / unit).is_dir()
            now = lines(f"core/{unit}" if folder else f"core/{unit}.py")
            name, before = f"`{unit}/`" if folder else f"`{unit}.py`", LINES_BEFORE.get(unit)
            rows.append(f"| {number} | {name} | {phrase} | {f'{before:,}' if before else ''} | {now:,} |")
            total += now
    before = sum(LINES_BEFORE.values())
    rows.append(f"| | **core** | | {before:,} | {total:,} |")
    for place, lines_before in LINES_BEFORE_ELSEWHERE.items():
        rows.append(f"| | `{place}` | was a part of core | {lines_before:,} | {lines(place):,} |")
        before, total = before + lines_before, total + lines(place)
    rows.append(f"| | **together** | | {before:,} | {total:,} |")
    header = "| floor | part of core | what it is for | lines at 7617d1a | lines now |"
    return "\n".join([header, "|---|---|---|---|---|", *rows])


def names_tables() -> str:
    """Return what stands here for the names of other projects, a table a kind of name."""
    parts = []
    for table in peer_names.tables():
        rows = [f"| `{'--' * (table.title[:5] == 'Flags')}{name}` | {text} |" for name, text in table.names.items()]
        parts += ["\n".join([f"### {table.title}", "", "| there | here |", "|---|---|", *rows])]
    return "\n\n".join(parts)


def verl_keys_table() -> str:
    """Return the keys of verl that have another name here, or none, and those that are accepted without effect."""
    rows = [f"| `{key}` | `{target}` |" for key, target in verl_keys.table("renamed").items()]
    for key in verl_keys.table("unsupported"):
        told = verl_keys.advice(key)
        rows.append(f"| `{key}` | {told.rule}; {told.fix} |")
    rows += [f"| `{key}` | no effect: {reason} |" for key, reason in verl_keys.table("no_effect").items()]
    return "\n".join(["| there | here |", "|---|---|", *rows])


BLOCKS = {  # (document, name of the markers): what stands between them
    ("core/README.md", "imports"): top_level_table,
    ("core/README.md", "lines"): lines_table,
    ("core/config/README.md", "defaults"): defaults_table,
    ("core/config/COMING_FROM.md", "names"): names_tables,
    ("core/config/COMING_FROM.md", "verl-keys"): verl_keys_table,
}


def with_block(text: str, name: str, block: str) -> str:
    """Return the text with this block between its markers ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    assert text.count(begin) == text.count(end) == 1, f"no markers of the block {name}"
    return f"{text.partition(begin)[0]}{begin}{block}\n{end}{text.partition(end)[2]}"


@pytest.mark.parametrize(("document", "name"), BLOCKS)
def test_a_generated_block_is_up_to_date(document, name):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert text == with_block(text, name, BLOCKS[document, name]()), "run python -m tests.test_structure"


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


# The cross-check keeps the packages that it compares with in an environment below its folder.
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if ".venv" not in path.parts)
DOCUMENTED = [*MARKDOWN, *PYTHON, *TESTS, *sorted((ROOT / "recipes").rglob("*.sh"))]
STARTS = "|".join([*TOP_LEVEL, "tests"])


def test_what_documents_name_exists():
    """Paths and commands of this repository that documents and comments name; ``*`` and ``<recipe>`` stand for any."""
    missing = []
    for path in DOCUMENTED:
        text = documentation(path)
        for name in re.findall(rf"(?<![\w./-])((?:{STARTS})/[\w./*<>-]*[\w*/>])", text):
            pattern = re.sub(r"<[^>]*>", "*", name).rstrip("/")
            if not any(ROOT.glob(pattern)) and not any(ROOT.glob(f"{pattern}.*")):
                missing.append(f"{relative(path)}: {name}")
        for name in re.findall(rf"-m ((?:{STARTS})\.\w+(?:\.\w+)*)", text):
            module = ROOT / name.replace(".", "/")
            if name not in MOVED and not any(map(Path.exists, (module.with_suffix(".py"), module / "__main__.py"))):
                missing.append(f"{relative(path)}: {name}")
    assert not missing


def test_no_document_outside_of_the_repository_is_cited():
    names = ("DESIGN", "LAYOUT.md", "STYLE.md", "gaps.md", "scale.md", "shared/", "facts/")
    invariants = re.compile(r"\bI(?:[1-9]|1[0-5])\b")
    cited = [
        f"{relative(path)}: {found}"
        for path in DOCUMENTED
        if path != Path(__file__)
        for found in [*filter(documentation(path).__contains__, names), *invariants.findall(documentation(path))]
    ]
    assert not cited


def test_each_invariant_names_tests_that_exist():
    invariants = (ROOT / "core/README.md").read_text(encoding="utf-8").partition("## Invariants")[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", invariants)
    assert len(named) >= 15
    absent = [f"{file}::{name}" for file, name in named if name not in dict(functions(ROOT / file))]
    assert not absent


# -- commands that have moved --------------------------------------------------------------------


@pytest.mark.parametrize("old", MOVED)
def test_an_old_command_prints_the_new_one(old):
    done = subprocess.run([sys.executable, "-m", *old.split(), "--any"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"python -m {MOVED[old]} " in done.stderr
    assert (ROOT / f"{MOVED[old].replace('.', '/')}.py").exists()


if __name__ == "__main__":
    for (document, name), block in BLOCKS.items():
        path = ROOT / document
        path.write_text(with_block(path.read_text(encoding="utf-8"), name, block()), encoding="utf-8")
