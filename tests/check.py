"""The tests of a change in hand, in about a minute: ``make check``. ``make test`` runs all of them.

    python -m tests.check [--seconds N] [--since COMMIT]

A change is what git shows since COMMIT (default: since the last commit, or since the one before where nothing is
uncommitted). Its tests are the test files that it touches, then the two that compute whole steps and compare them with
what was published (most planted bugs that no other test of the minute found failed there), then those that import a
touched module by name, then those in the folder that mirrors the module's, and last the ones that hold the structure
and the configuration. What does not fit into the time is counted as not run; so is a test that takes a quarter of it,
unless it is of the first two kinds: one slow test must not take the place of fifty.
"""

from __future__ import annotations

import argparse
import ast
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = ("tests/test_structure.py", "tests/core/config/test_config.py", "tests/core/algorithm")
FIRST = ("tests/recipes/test_from_scratch.py",)
SECONDS = 60


class Minute:
    """A pytest plugin that ends the session when its time is over; every test that did not run is counted.

    A test that takes more than a quarter of the time is given up, unless its file is ``unbounded``: a signal, which a
    timer sends to the main thread, skips it.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, seconds: float, unbounded: Collection[str] = ()) -> None:
        self.ends, self.left, self.slow = self.clock() + seconds, 0, 0
        self.longest, self.unbounded = seconds / 4, tuple(unbounded)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Give up a test whose fixtures take too long."""
        with self._bounded(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Give up a test that takes too long."""
        with self._bounded(item):
            return (yield)

    @contextmanager
    def _bounded(self, item: pytest.Item) -> Iterator[None]:
        if item.nodeid.startswith(self.unbounded or ("\0",)):
            yield
            return
        running = [True]

        def give_up(*_: object) -> None:
            if running:
                self.slow += 1
                pytest.skip(f"takes more than {self.longest:g} s")

        before = signal.signal(signal.SIGUSR2, give_up)
        main = threading.main_thread().ident
        timer = threading.Timer(self.longest, lambda: signal.pthread_kill(main, signal.SIGUSR2))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            running.clear()
            timer.cancel()
            timer.join()  # a signal that was sent just now still finds its handler
            signal.signal(signal.SIGUSR2, before)

    def pytest_runtest_protocol(self, item: object, nextitem: object) -> bool | None:
        """Skip over a test, without a report, where no time is left."""
        if self.clock() < self.ends:
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
    yield from FIRST
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
    changed = changed_files(args.since)
    minute, files = Minute(args.seconds, [*changed, *FIRST]), select_tests(changed)
    print(f"{len(changed)} files changed, {len(files)} files of tests, {args.seconds:g} s", flush=True)
    status = pytest.main(["-p", "no:cacheprovider", "--no-header", "-x", *files], plugins=[minute])
    if minute.left:
        print(f"{minute.left} tests were not run: the time was over. make test runs all of them.")
    if minute.slow:
        print(f"{minute.slow} tests were given up after {minute.longest:g} s each. make test runs all of them.")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
