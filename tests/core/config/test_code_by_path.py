"""Users' files by path: what they may import, and what is said where an import cannot be
answered."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.config.code_by_path import load_object
from core.errors import InputError
from core.rewards.graders import GraderPool
from core.rewards.grading import CustomFunction, Job, Scorers

REWARD = (
    "from words import weight\n\ndef compute_score(solution_str, **kwargs):\n    return weight * "
    "len(solution_str)\n"
)


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_file_imports_from_its_folder_its_project_s_root_and_src_and_leaves_no_folder_behind(
    tmp_path,
):
    files = {
        "setup.py": "",
        "package_of_root/part.py": "above = 2\n",
        "src/package_of_src.py": "source = 3\n",
        "rewards/mine.py": "import one_beside\nfrom package_of_root.part import above\n"
        "from package_of_src import source\nx = (one_beside.y, above, source)\n",
        "rewards/one_beside.py": "y = 1\n",
        "../outside_of_it.py": "",
        "rewards/other.py": "import outside_of_it\n",
    }
    project, before = write(tmp_path / "project", files), list(sys.path)
    assert load_object(f"{project}/rewards/mine.py:x") == (1, 2, 3)
    with pytest.raises(ModuleNotFoundError, match="outside_of_it"):
        load_object(f"{project}/rewards/other.py:x")
    assert sys.path == before


def test_a_file_is_run_once_and_files_of_one_name_do_not_collide(tmp_path):
    write(tmp_path, {"a/mine.py": "x = object()\n", "b/mine.py": "x = 2\n"})
    assert load_object(f"{tmp_path}/a/mine.py:x") is load_object(f"{tmp_path}/a/mine.py:x")
    assert load_object(f"{tmp_path}/b/mine.py:x") == 2


def test_a_reward_function_s_neighbours_are_imported_in_a_grader_too(tmp_path):
    write(tmp_path, {"pyproject.toml": "", "rewards/mine.py": REWARD, "words.py": "weight = 2\n"})
    pool = GraderPool(
        Scorers(custom=CustomFunction(f"{tmp_path}/rewards/mine.py")), num_workers=1, timeout_s=60.0
    )
    try:
        assert asyncio.run(pool.run(Job("any", "four", None, {}))).value == 8.0
    finally:
        pool.close()


def test_what_goes_to_an_actor_needs_no_import_there(tmp_path):
    cloudpickle = pytest.importorskip("ray").cloudpickle
    write(tmp_path, {"pyproject.toml": "", "rewards/mine.py": REWARD, "words.py": "weight = 2\n"})
    packed = cloudpickle.dumps(load_object(f"{tmp_path}/rewards/mine.py:compute_score"))
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(solution_str='four'))"
    assert (
        subprocess.run([sys.executable, "-c", script], input=packed, capture_output=True).stdout
        == b"8\n"
    )
    assert pickle.loads(packed)(solution_str="ab") == 4


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("import a_package_of_nobody\n", "install a_package_of_nobody"),
        ("import needs_verl\n", "install verl"),
    ],
)
def test_a_module_that_is_not_there_is_named_with_what_to_do(tmp_path, text, advice):
    mine = f"{text}def compute_score(solution_str):\n    return 0\n"
    write(tmp_path, {"setup.cfg": "", "mine.py": mine, "needs_verl.py": "import verl.protocol\n"})
    with pytest.raises(InputError, match=f"^custom_reward_function.path=.*{advice}"):
        CustomFunction(f"{tmp_path}/mine.py")


@pytest.mark.parametrize("where", ["mine.py", "mine"])
def test_a_module_that_exits_while_it_is_imported_does_not_end_the_run(
    tmp_path, monkeypatch, where
):
    """With status 0 a scheduler would take it for a success."""
    write(tmp_path, {"mine.py": "import sys\nsys.exit(0)\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"^key=mine.*SystemExit\(0\); put what it runs under if"):
        load_object(f"{where}:function", "key")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("EXAMPLES = ['Q: 2+3 A: 5']\n", "EXAMPLES must be a list of .*rename yours"),
        ("EXAMPLES = 5\n", "EXAMPLES must be a list of .*rename yours"),
        ("compute_score = max\n", "which it refuses"),
    ],
)
def test_a_variable_of_another_meaning_in_a_reward_file_is_named(tmp_path, text, said):
    mine = f"def compute_score(solution_str):\n    return 0\n{text}"
    write(tmp_path, {"mine.py": mine})
    with pytest.raises(InputError, match=f"(?s)^custom_reward_function.*{said}"):
        CustomFunction(f"{tmp_path}/mine.py")


def test_a_list_of_tools_names_classes_of_its_project(tmp_path):
    files = {"setup.py": "", "my_tools/dice.py": "class Dice:\n    pass\n", "config/tools.yaml": ""}
    file = write(tmp_path, files) / "config" / "tools.yaml"
    assert load_object("my_tools.dice:Dice", beside=file).__name__ == "Dice"
    with pytest.raises(InputError, match="no module 'my_tools.cards'"):
        load_object("my_tools.cards:Card", beside=file)
