"""An extension that is deleted takes only what it adds along: a copy without it trains, and its kernel's tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, needs
from tests.without import EXTENSIONS, copy_without

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ("ppo", "grpo", "dapo", "search_r1", "sft")
PROGRAM = f"""
import os, sys
from pathlib import Path
from core.command_line import prepare
from core.config import compose
from core.config.recipes import trainer_of
from core.ray_trainer import RayPPOTrainer
from results.report import main as report
from tests.core import scripted_run
for recipe in {RECIPES}:
    compose(recipe, [], trainer_of(recipe)[1])
folder = scripted_run.prepare(Path(sys.argv[1]))
for steps in (2, 3):
    run = RayPPOTrainer(scripted_run.configured(folder, "run", "trainer.save_freq=1", steps=steps)).init_workers()
    run.fit()
print("trained", run.session.step)
if sys.argv[2:] == ["report"]:
    assert report([str(run.session.run_dir), "--out", str(folder / "report")]) == 0
    os.environ["DRY_RUN"] = "1"
    try:
        prepare("grpo", ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"])
    except SystemExit as ended:
        print("dry run ended with", ended.code)
print("imported", *(name for name in sys.modules if name.startswith("core.extensions.")))
"""


def trained(code: Path, folder: Path, *steps: str) -> subprocess.CompletedProcess:
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, str(folder), *steps]
    return subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, timeout=300)


def check(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0 and "trained 3" in done.stdout, done.stderr[-2000:]
    assert "dry run ended with 0" in done.stdout, done.stderr[-2000:]


def test_the_kernel_trains_and_reports_without_any_extension(tmp_path):
    done = trained(copy_without(EXTENSIONS, tmp_path / "code"), tmp_path / "run", "report")
    check(done)
    assert "core.plan" not in done.stdout and "a step: " in done.stdout


def test_a_run_imports_only_the_declarations_of_extensions_that_it_does_not_ask_for(tmp_path):
    done = trained(ROOT, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2000:]
    imported = done.stdout.rpartition("imported ")[2].split()
    parts = [name.split(".")[2:] for name in imported]
    assert {part[0] for part in parts} >= set(EXTENSIONS)  # their declarations
    unasked = set(EXTENSIONS) - {"capsules", "trace"}  # a resume removes what these recorded of later steps
    assert [part for part in parts if part[0] in unasked and part[1:] not in ([], ["extension"], ["keys"])] == []


DEFAULT = "not slow and not processes and not gpu and not cluster and not deletion"


@pytest.mark.deletion
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["all", *EXTENSIONS])
def test_the_kernels_tests_pass_without(name):
    """Without all, every test of the kernel; without one, those that ask for an extension, which may be another one.

    A test that asks for none passes without all of them, and the others cannot lend it what it does not ask for.
    """
    asked = ["-m", DEFAULT if name == "all" else f"needs and {DEFAULT}"]
    command = [sys.executable, "-m", "tests.without", name, "-n", "2", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > (1000 if name == "all" else 100)


def test_what_needs_a_deleted_extension_is_left_out_and_a_misspelt_one_is_an_error(tmp_path, monkeypatch):
    def left_out(*names):
        marks = [pytest.mark.needs(*names).mark]
        try:
            conftest.pytest_runtest_setup(SimpleNamespace(iter_markers=lambda name: marks))
        except pytest.skip.Exception as skipped:
            return str(skipped)

    assert set(needs.EXTENSIONS) == set(EXTENSIONS) and left_out(*EXTENSIONS) is None
    with pytest.raises(pytest.UsageError, match=r"needs\('trcae'\): no such extension; one of .*trace"):
        left_out("trcae")
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    (tmp_path / "core/extensions/judge").mkdir(parents=True)
    assert left_out("judge") is None and "core/extensions/trace" in left_out("judge", "trace")
    with pytest.raises(pytest.UsageError):
        left_out("trcae")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_kernel_trains_without_one(tmp_path, name):
    done = trained(copy_without([name], tmp_path / "code"), tmp_path / "run", "report")
    check(done)
    assert ("core.plan" in done.stdout) == (name != "planning")


def test_a_key_of_a_deleted_extension_is_unknown_and_its_function_is_missed_by_name(tmp_path):
    code = copy_without(["trace", "judge"], tmp_path / "code")
    asked = "from core.config import examine; print(examine('grpo', ['trainer.trace.freq=1']).problems)"
    missed = "from core.config import extensions; extensions.function('judge')"
    told = [
        subprocess.run([sys.executable, "-c", line], cwd=code, capture_output=True, text=True, timeout=120)
        for line in (asked, missed)
    ]
    assert "trainer.trace" in told[0].stdout and "judge" in told[1].stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "name, command",
    [
        ("planning", ["core.plan", "grpo"]),
        ("planning", ["results.feasible"]),
        ("evaluation", ["core.evaluate", "report", "a.jsonl"]),
        ("evaluation", ["results.report", "answers.scores-gsm8k.jsonl"]),
    ],
)
def test_a_command_of_a_deleted_extension_ends_in_one_line_with_the_fix(tmp_path, name, command):
    code = copy_without([name], tmp_path / "code")
    (code / "answers.scores-gsm8k.jsonl").touch()
    environment = {**os.environ, "PYTHONPATH": str(code)}
    run = [sys.executable, "-m", *command]
    done = subprocess.run(run, cwd=code, env=environment, capture_output=True, text=True, timeout=120)
    folder = f"core/extensions/{name}"
    rule = f"needs the extension {folder}, which is not there; restore it: git checkout -- {folder}"
    assert done.stderr.splitlines() == [f"{command[0]}: {rule}"] and done.returncode == 1


def test_a_url_without_the_extension_that_reads_it_is_a_problem_with_a_fix(tmp_path):
    code = copy_without(["remote"], tmp_path / "code")
    program = (
        "from core.config import examine, locations, paths\n"
        "config = examine('grpo', ['data.train_files=s3://bucket/train.parquet']).config\n"
        "print(*paths.missing(config), sep='\\n')\n"
        "locations.local_path('s3://bucket/model', 'actor_rollout_ref.model.path')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=code, capture_output=True, text=True, timeout=120)
    rule = "is a URL, and the extension that reads and writes those is not there; give a path on this machine"
    assert f"data.train_files=s3://bucket/train.parquet: {rule}" in done.stdout, done.stderr[-2000:]
    assert f"actor_rollout_ref.model.path=s3://bucket/model: {rule}" in done.stderr.splitlines()[-1]
