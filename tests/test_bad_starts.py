"""Starts that cannot succeed end in a line: an old command, a Python without packages, a half-made environment.

The interpreters are this one without site-packages (``-S``) and environments without pip, made here. They run copies of
the repository's Python files where the state of ``.venv`` matters.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import core

ROOT = Path(__file__).resolve().parent.parent
BARE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def start(*arguments, folder=ROOT, python=(sys.executable, "-S")):
    return subprocess.run([*python, *arguments], cwd=folder, env=BARE, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path):
    """The repository without an environment."""
    for package in ("core", "recipes", "results", "data_preprocess", "reward_scores"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.json*"))
    return tmp_path


def one_line(done) -> str:
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    (line,) = done.stderr.splitlines()
    return line


# --- a Python without packages ---


@pytest.mark.parametrize(
    "command",
    ["core.plan", "results.report", "data_preprocess.gsm8k", "recipes.lab.tour", "recipes.search_r1.main_search_r1"],
)
def test_a_command_without_its_packages_names_one_and_what_to_type(command, clone):
    line = one_line(start("-m", command, folder=clone))
    begin = rf"[\w-]+: is not installed for {re.escape(sys.executable)}; type make setup, then "
    assert re.match(begin, line) and line.endswith("source .venv/bin/activate")


@pytest.mark.parametrize(
    "body, error",
    [
        ("import core.nope", "No module named 'core.nope'"),
        ("from core import nope", "cannot import name 'nope'"),
        ("import yaml.nope", "No module named 'yaml.nope'"),
        ("1 / 0", "division by zero"),
    ],
)
def test_other_errors_keep_their_traceback(body, error, clone):
    (clone / "recipes/lab/broken.py").write_text(body)
    done = start("-m", "recipes.lab.broken", folder=clone, python=(sys.executable,))
    assert done.returncode == 1 and "Traceback" in done.stderr and error in done.stderr
    assert "sys.excepthook" not in done.stderr


def test_a_program_that_imports_core_keeps_its_traceback():
    done = start("-c", "import core, yaml")
    assert "Traceback" in done.stderr and "No module named 'yaml'" in done.stderr


def test_the_oldest_python_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].startswith(">={}.{},".format(*core.OLDEST))


# --- another version of Python ---


@pytest.mark.parametrize("version", [(3, 8), (3, 10)])
def test_a_python_of_another_version_is_named(version):
    pretend = f"import runpy, sys; sys.version_info = ({version[0]}, {version[1]}, 0, 'final', 0)\n"
    typed = "sys.argv[0] = '-m'\n"  # as it is while python -m looks for its module
    run = "runpy.run_module('recipes.grpo.main_grpo', run_name='__main__')"
    line = one_line(start("-c", pretend + typed + run))
    assert line.startswith(f"Python {version[0]}.{version[1]}: this repository needs 3.11 or 3.12; type make setup")


# --- a half-made environment ---


@pytest.fixture
def half_made(clone):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True, env=BARE)
    return clone


def test_a_half_made_environment_is_named(half_made):
    python = str(half_made / ".venv/bin/python")
    line = one_line(start("-m", "recipes.grpo.main_grpo", folder=half_made, python=(python,)))
    assert f"is not installed for {python}; type make setup, then " in line


@pytest.mark.parametrize(
    "script", ["grpo/run_qwen2.5_0.5b_gsm8k.sh", "ppo/run_lab.sh", "dapo/run_qwen2.5_32b.sh", "search_r1/run_lab.sh"]
)
def test_a_run_script_in_a_half_made_environment_ends_in_the_line(script, half_made):
    line = one_line(start(half_made / "recipes" / script, folder=half_made, python=("bash",)))
    assert "is not installed for" in line and "; type make setup" in line


# --- set-up itself ---


@pytest.mark.parametrize(
    ("free", "held", "begins"),
    [(2_100_000, 0, False), (2_100_000, 4_000_000, True), (60_000_000, 0, True)],
    ids=["full", "half_made", "room"],
)
def test_set_up_on_a_full_disk_ends_before_pip(free, held, begins, tmp_path):
    """The commands that measure the disk are stand-ins; the Python of the case that begins makes no environment."""
    script = tmp_path / "environment/setup.sh"
    script.parent.mkdir()
    shutil.copy(ROOT / "environment/setup.sh", script)
    commands = {
        "df": f'printf "Filesystem blocks Used Available Capacity Mounted\\ndisk 9 9 {free} 99%% /home\\n"',
        "du": f'printf "{held}\\t.venv/\\n"',
        "python": '[[ "$1" != -m ]] || { echo begun; exit 3; }',
    }
    for name, does in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(0o755)
    env = BARE | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHON": "python",
        "TORCH_INDEX_URL": "http://127.0.0.1:9",
    }
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True)
    assert ("begun" in done.stdout) == begins and done.returncode == (3 if begins else 1), done.stderr
    if not begins:
        assert done.stderr == (
            "set-up takes at least 5 GB and /home has 2 GB free; make room there, "
            "or clone the repository to a larger disk\n"
        )
        assert not (tmp_path / ".venv").exists()
