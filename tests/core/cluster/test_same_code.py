"""A worker that has core from another checkout is an error with both folders, before a model loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from core.cluster.ray_pools import check_code
from core.errors import InputError
from tests.checkpoints import ROOT

ANSWERS = """
import json, sys, cloudpickle
function = cloudpickle.loads(sys.stdin.buffer.read())
print(json.dumps(function(None)))
"""


class Actor:
    """Calls what it is sent in a process that imports from ``path``, as Ray's actors do."""

    def __init__(self, path: Path):
        self.path = path
        self.__ray_call__ = self

    def remote(self, function):
        env = {"PYTHONPATH": str(self.path), "PATH": ""}
        command = [sys.executable, "-c", ANSWERS]
        sent = cloudpickle.dumps(function)
        done = subprocess.run(command, input=sent, env=env, cwd="/", capture_output=True, check=True, timeout=60)
        return json.loads(done.stdout)


def results(calls):
    return list(calls.values())


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    for name in ("core", "reward_scores"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_same_files_elsewhere_are_the_same_code(clone):
    check_code({"learner rank 0": Actor(ROOT), "engine 0": Actor(clone)}, results)


@pytest.mark.parametrize("file", ["core/algorithm/losses.py", "reward_scores/score.py", "core/a_new_file.py"])
def test_another_checkout_is_refused(file, clone, tmp_path):
    shutil.copytree(clone, tmp_path / "clone")
    with open(tmp_path / "clone" / file, "a") as changed:
        changed.write("\n# another version\n")
    with pytest.raises(InputError) as raised:
        check_code({"learner rank 0": Actor(ROOT), "engine 0": Actor(tmp_path / "clone")}, results)
    text = str(raised.value)
    assert text.startswith(f"core={ROOT / 'core'}: engine 0 runs other code") and "\n" not in text
    assert str(tmp_path / "clone" / "core") in text and "PYTHONPATH" in text
