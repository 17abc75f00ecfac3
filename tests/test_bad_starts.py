"""Starts that cannot succeed end in a line: an old command, a Python without packages, a half-made
environment.

The interpreters are this one without site-packages (``-S``) and an environment without pip, made
here. They run copies of the repository's Python files where the state of ``.venv`` matters.
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
BARE = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
}


def start(*arguments, folder=ROOT, python=(sys.executable, "-S")):
    return subprocess.run(
        [*python, *arguments], cwd=folder, env=BARE, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository without an environment."""
    folder = tmp_path_factory.mktemp("clone")
    for package in ("core", "recipes", "results", "data_preprocess", "reward_scores"):
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.json*"),
        )
    return folder


def one_line(done) -> str:
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr, (
        done.stderr
    )
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    "command", ["core.plan", "recipes.lab.tour", "recipes.search_r1.main_search_r1"]
)
def test_a_command_without_its_packages_names_one_and_what_to_type(command, clone):
    line = one_line(start("-m", command, folder=clone))
    begin = rf"[\w-]+: is not installed for {re.escape(sys.executable)}; type make setup, then "
    assert re.match(begin, line) and line.endswith("source .venv/bin/activate")


@pytest.mark.parametrize(
    "body, error",
    [
        ("from core import nope", "cannot import name 'nope'"),
        ("import yaml.nope", "No module named 'yaml.nope'"),
    ],
)
def test_other_errors_keep_their_traceback(body, error, clone):
    (clone / "recipes/lab/broken.py").write_text(body)
    done = start("-m", "recipes.lab.broken", folder=clone, python=(sys.executable,))
    assert done.returncode == 1 and "Traceback" in done.stderr and error in done.stderr


def test_a_python_of_another_version_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].startswith(">={}.{},".format(*core.OLDEST))
    pretend = "import runpy, sys; sys.version_info = (3, 8, 0, 'final', 0)\n"
    typed = "sys.argv[0] = '-m'\n"  # as it is while python -m looks for its module
    run = "runpy.run_module('recipes.grpo.main_grpo', run_name='__main__')"
    line = one_line(start("-c", pretend + typed + run))
    assert line.startswith("Python 3.8: this repository needs 3.11 to 3.14; type make setup")


def test_a_half_made_environment_is_named_by_commands_and_run_scripts(tmp_path):
    for package in ("core", "recipes", "reward_scores"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.json*"),
        )
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True, env=BARE
    )
    python = str(tmp_path / ".venv/bin/python")
    line = one_line(start("-m", "recipes.grpo.main_grpo", folder=tmp_path, python=(python,)))
    assert f"is not installed for {python}; type make setup, then " in line
    for script in ("grpo/run_qwen2.5_0.5b_gsm8k.sh", "search_r1/run_lab.sh"):
        line = one_line(start(tmp_path / "recipes" / script, folder=tmp_path, python=("bash",)))
        assert "is not installed for" in line and "; type make setup" in line
