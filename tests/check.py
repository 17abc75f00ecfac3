"""The tests of a change in hand, in about a minute: ``make check``. ``make test`` runs all of them.

    python -m tests.check [--seconds N] [--since COMMIT]

A change is what git shows since COMMIT (default: since the last commit, or since the one before where nothing is
uncommitted). Its tests are the test files that it touches, then those that import a touched module by name, then those
in the folder that mirrors the module's, and last the ones that hold the structure and the configuration. What does not
fit into the time is counted as not run.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = ("tests/test_structure.py", "tests/core/config/test_config.py", "tests/core/algorithm")
SECONDS = 60


class Minute:
    """A pytest plugin that ends the session when its time is over; every test that did not run is counted."""

    def __init__(self, seconds: float) -> None:
        self.ends, self.left = time.monotonic() + seconds, 0

    def pytest_runtest_protocol(self, item: object, nextitem: object) -> bool | None:
        """Skip over a test, without a report, where no time is left."""
        if time.monotonic() < self.ends:
            return None
        self.left += 1
        return True


def changed_files(since: str | None) -> list[str]:
    """Return the changed and new files, relative to the root."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    untracked = git("ls-files", "--others", "--exclude-standard")
    if since is not None:
        return [*git("diff", "--name-only", since), *untracked]
    uncommitted = [*git("diff", "--name-only", "HEAD"), *untracked]
    return uncommitted or git("diff", "--name-only", "HEAD~1")


def select_tests(changed: Sequence[str]) -> list[str]:
    """Return the test files of a change, those that are nearest to it first."""
    return list(dict.fromkeys(path for path in _candidates(changed) if (ROOT / path).exists()))


def _candidates(changed: Sequence[str]) -> Iterator[str]:
    every = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    yield from (path for path in every if path in changed)
    modules = {path.removesuffix(".py").replace("/", ".") for path in changed if path.endswith(".py")}
    yield from (path for path in every if modules & imported(ROOT / path))
    folders = {f"tests/{Path(path).parent.as_posix()}" for path in changed if path.endswith((".py", ".yaml"))}
    yield from (path for path in every if Path(path).parent.as_posix() in folders)
    yield from (path for always in ALWAYS for path in every if path.startswith(always))


def imported(path: Path) -> set[str]:
    """Return the modules that a file names in its imports: ``from a import b`` names ``a`` and ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and return pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.check", description="Runs the tests of a change in hand.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no test begins after this time (default: 60)")
    parser.add_argument("--since", metavar="COMMIT", help="what counts as changed (default: since the last commit)")
    args = parser.parse_args(arguments)
    import pytest

    changed = changed_files(args.since)
    minute, files = Minute(args.seconds), select_tests(changed)
    print(f"{len(changed)} files changed, {len(files)} files of tests, {args.seconds:g} s", flush=True)
    status = pytest.main(["-p", "no:cacheprovider", "--no-header", "-x", *files], plugins=[minute])
    if minute.left:
        print(f"{minute.left} tests were not run: the time was over. make test runs all of them.")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
