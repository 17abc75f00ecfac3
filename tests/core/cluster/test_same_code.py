"""A worker that has core from another checkout is an error with both folders, before a model loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from core.cluster.processes import code_of_here
from core.cluster.ray_pools import check_code
from core.errors import InputError
from tests.checkpoints import ROOT

PRINT = "import json; from core.cluster.processes import code_of_here; print(json.dumps(code_of_here()))"


def test_the_same_files_elsewhere_are_the_same_code_and_others_are_refused(tmp_path):
    for name in ("core", "reward_scores"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))

    def there():
        done = subprocess.run(
            [sys.executable, "-c", PRINT], env={"PYTHONPATH": str(tmp_path)}, cwd="/", capture_output=True, check=True
        )
        return json.loads(done.stdout)

    def check(code):
        actors = {"learner rank 0": None, "engine 0": None}
        check_code(SimpleNamespace(actors=actors, call=lambda *_: [code_of_here(), code]))

    check(there())
    (tmp_path / "core" / "a_new_file.py").write_text("")
    with pytest.raises(InputError) as raised:
        check(there())
    text = str(raised.value)
    assert text.startswith(f"core={ROOT / 'core'}: engine 0 runs other code") and str(tmp_path / "core") in text
