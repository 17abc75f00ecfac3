"""``make check``: which tests a change gets, and what the end of its time leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import check
from tests.check import ROOT, Minute, changed_files, imported, select_tests


def test_a_changed_module_gets_the_tests_that_import_it_before_those_of_its_folder():
    files = select_tests(["core/algorithm/kl.py"])
    assert "core.algorithm.kl" in imported(ROOT / files[len(check.FIRST)])
    assert files.index("tests/core/algorithm/test_kl.py") < files.index("tests/core/algorithm/test_schedules.py")
    assert "tests/test_structure.py" in files and len(files) == len(set(files))


def test_a_changed_test_comes_first_and_one_that_was_deleted_is_left_out():
    files = select_tests(["tests/core/data/test_stream.py", "tests/core/data/test_gone.py"])
    assert files[0] == "tests/core/data/test_stream.py" and "tests/core/data/test_gone.py" not in files


def test_what_the_time_does_not_allow_is_counted_and_not_reported_as_passed(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_one(): pass\ndef test_two(): assert False\n")
    program = (
        "import pytest; from tests.check import Minute; minute = Minute({0});"
        "status = pytest.main(['-p', 'no:cacheprovider', 'test_two.py'], plugins=[minute]); print('left', minute.left)"
    )
    for seconds, left, said in ((0, 2, "no tests ran"), (60, 0, "1 failed, 1 passed")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(seconds)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
        )
        assert f"left {left}" in done.stdout and said in done.stdout, done.stdout


def test_the_two_files_that_compute_whole_steps_always_run_and_early():
    files = select_tests(["core/engines/in_process_engine.py", "tests/core/engines/test_engines.py"])
    assert files[:3] == ["tests/core/engines/test_engines.py", *check.FIRST]
    assert set(check.FIRST) <= set(select_tests(["README.md"]))


def test_one_slow_test_is_given_up_and_does_not_eat_the_minute(tmp_path):
    slow = "import time, pytest\ndef test_slow(): time.sleep(9)\ndef test_two(): pass\n"
    slow += "@pytest.fixture(scope='module')\ndef late(): time.sleep(9)\ndef test_late(late): pass\n"
    (tmp_path / "test_slow.py").write_text(slow)
    (tmp_path / "test_changed.py").write_text("import time\ndef test_slow(): time.sleep(0.6)\n")
    program = (
        "import pytest; from tests.check import Minute; minute = Minute(60, ['test_changed.py']); minute.longest = 0.5;"
        "status = pytest.main(['-p', 'no:cacheprovider', 'test_slow.py', 'test_changed.py'], plugins=[minute]);"
        "print('gave up', minute.slow, 'status', int(status))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert "2 passed, 2 skipped" in done.stdout and "gave up 2 status 0" in done.stdout, done.stdout + done.stderr


def test_the_clock_starts_with_the_plugin():
    assert Minute(60).pytest_runtest_protocol(object(), None) is None
    assert Minute(0).pytest_runtest_protocol(object(), None) is True


def test_after_a_commit_its_files_are_the_change(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)

    def git(*words: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("first", "second"):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-q", "-m", name)
    assert changed_files(None) == ["second"]
    (tmp_path / "third").touch()
    assert changed_files(None) == ["third"]
    assert changed_files("HEAD~1") == ["second", "third"]


@pytest.mark.parametrize("status", [0, 1])
def test_the_exit_status_is_that_of_the_tests(status, monkeypatch, capsys):
    monkeypatch.setattr(check, "changed_files", lambda since: ["core/algorithm/kl.py"])
    monkeypatch.setattr(pytest, "main", lambda arguments, plugins: pytest.ExitCode(status))
    assert check.main([]) == status
    assert capsys.readouterr().out.startswith("1 files changed")
