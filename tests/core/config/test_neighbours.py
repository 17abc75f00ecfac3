"""Imports of a user's file from its own project."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from core.config.plugins import load_object


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_file_imports_what_lies_beside_and_above_it_up_to_the_root_of_its_project(tmp_path, capsys):
    mine = "import one_beside\nfrom ..own_package.part import above\nx = (one_beside.y, above)\n"
    project = write(
        tmp_path / "project",
        {
            "setup.py": "",
            "own_package/part.py": "above = 2\n",
            "rewards/one_beside.py": "y = 1\n",
            "rewards/mine.py": mine,
            "rewards/other.py": "import outside_of_it\n",
            "../outside_of_it.py": "",
        },
    )
    assert load_object(f"{project}/rewards/mine.py:x") == (1, 2)
    assert f"imports one_beside from {project}/rewards" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="outside_of_it"):
        load_object(f"{project}/rewards/other.py:x")


def test_no_import_of_another_file_is_answered_by_a_users_project(tmp_path):
    mine = "def find():\n    import a_name_of_mine\n    return a_name_of_mine.y\n"
    write(tmp_path, {"setup.py": "", "a_name_of_mine.py": "y = 1\n", "mine.py": mine})
    find = load_object(f"{tmp_path}/mine.py:find")
    with pytest.raises(ModuleNotFoundError):
        import a_name_of_mine  # noqa: F401
    assert find() == 1


def test_a_folder_of_runs_with_the_name_of_a_package_is_none(tmp_path):
    mine = "try:\n    import a_logger\nexcept ImportError:\n    a_logger = None\n"
    write(tmp_path, {"setup.py": "", "a_logger/run-1/files/code.py": "", "mine.py": mine})
    assert load_object(f"{tmp_path}/mine.py:a_logger") is None


@pytest.mark.parametrize(
    "imported", ["import environment", "import environment as again; environment = again", "import tests.core as tests"]
)
def test_a_module_named_as_a_folder_of_this_repository_is_the_users_own(tmp_path, capsys, imported):
    mine = f"{imported}\nfrom environment import key\nfrom core.scoring import scale\nx = key * scale\n"
    files = {"environment.py": "key = 3\n", "core/scoring.py": "import environment\nscale = environment.key + 1\n"}
    project = write(tmp_path, {"setup.py": "", "tests/core/__init__.py": "", **files, "rewards/mine.py": mine})
    assert load_object(f"{project}/rewards/mine.py:x") == 12
    said = capsys.readouterr().err
    assert f"imports core from {project}, not this repository's core" in said
    import core.errors
    import tests

    assert core.errors.InputError and not hasattr(tests, "core") or Path(tests.core.__path__[0]).parts[-2] == "tests"


def test_a_mere_folder_does_not_hide_a_package_of_this_repository(tmp_path):
    """As a tests folder that mirrors a package: ``tests/core/rollout`` beside ``core/rollout``."""
    mine = "from core.rollout import outside_code\nfrom core.config import compose\n"
    files = {"tests/core/rollout/mine.py": mine, "tests/core/config/test_a.py": ""}
    project = write(tmp_path, {"setup.py": "", **files})
    from core.rollout import outside_code

    assert load_object(f"{project}/tests/core/rollout/mine.py:outside_code") is outside_code


def test_what_the_users_folder_lacks_is_this_repositorys(tmp_path):
    mine = (
        "from core.errors import InputError\nfrom core.own import y\ndef f():\n    import core.own\n    return core\n"
    )
    project = write(tmp_path, {"setup.py": "", "core/__init__.py": "", "core/own.py": "y = 1\n", "mine.py": mine})
    from core.errors import InputError

    assert load_object(f"{project}/mine.py:InputError") is InputError
    assert load_object(f"{project}/mine.py:f")().own.y == 1


@pytest.mark.parametrize("name", ["environment", "core.a_name_of_nobody"])
def test_a_module_of_neither_is_refused_with_both_places(tmp_path, name):
    project = write(tmp_path, {"setup.py": "", "mine.py": f"import {name}\n"})
    with pytest.raises(ModuleNotFoundError, match=f"'{name}' in the folders of {project}/mine.py.* repository's own"):
        load_object(f"{project}/mine.py:x")


def test_two_projects_may_have_modules_of_one_name(tmp_path):
    for project in ("one", "two"):
        mine = "import utils\nfrom utils.more import z\nx = (utils.y, z)\n"
        files = {"utils/__init__.py": f"y = '{project}'\n", "utils/more.py": "import utils\nz = utils.y\n"}
        write(tmp_path / project, {"setup.py": "", **files, "mine.py": mine})
    assert [load_object(f"{tmp_path}/{one}/mine.py:x") for one in ("one", "two")] == [("one", "one"), ("two", "two")]


def test_what_a_project_lacks_is_named_as_the_user_wrote_it(tmp_path):
    files = {"utils/__init__.py": "", "utils/deep.py": "import a_package_of_nobody\n"}
    for line, missing in (("import utils.nothing", "utils.nothing"), ("import utils.deep", "a_package_of_nobody")):
        project = write(tmp_path / missing, {"setup.py": "", **files, "mine.py": line})
        with pytest.raises(ModuleNotFoundError, match=f"^No module named '{missing}'$") as raised:
            load_object(f"{project}/mine.py:x")
        assert raised.value.name == missing


def test_a_file_of_a_repository_that_is_the_package_recipe(tmp_path, capsys):
    mine = "from recipe.game.rules import x\n"
    project = write(tmp_path, {".git/HEAD": "", "game/rules.py": "x = 1\n", "game/mine.py": mine})
    assert load_object(f"{project}/game/mine.py:x") == 1
    assert f"imports recipe.game.rules from {project}, whose root is the package recipe" in capsys.readouterr().err
    other = write(tmp_path / "other", {"setup.py": "", "mine.py": "import recipe.game.rules\n"})
    with pytest.raises(ModuleNotFoundError, match="recipe"):
        load_object(f"{other}/mine.py:x")


def test_a_file_that_is_to_be_copied_into_verl_has_the_stand_in_beside_it_and_its_own_first(tmp_path, capsys):
    mine = "from .base_tool import BaseTool\nfrom .schemas import ToolResponse\nfrom . import gsm8k\nx = gsm8k.x\n"
    project = write(tmp_path, {"setup.py": "", "tools/gsm8k.py": "x = 5\n", "tools/mine.py": mine})
    assert load_object(f"{project}/tools/mine.py:BaseTool").__module__ == "core.extensions.verl_classes.base_tool"
    assert load_object(f"{project}/tools/mine.py:x") == 5
    assert f"{project}/tools has no schemas: verl.tools.schemas is imported in its place" in capsys.readouterr().err
    (project / "tools/other.py").write_text("from .a_module_of_nobody import x\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_of_nobody"):
        load_object(f"{project}/tools/other.py:x")
