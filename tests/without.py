"""The kernel's tests in a copy of the repository without an extension: ``python -m tests.without NAME|all``.

The copy has neither ``core/extensions/<name>`` nor ``tests/core/extensions/<name>``. The kernel's tests are tests/core
less tests/core/extensions; one that needs the extension is skipped there (the marker ``needs``). Other arguments go to
pytest: ``-n 2``, ``-k health``, or paths, which take the place of tests/core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTENSIONS = sorted(path.parent.name for path in (ROOT / "core/extensions").glob("*/extension.py"))
KERNEL = ("tests/core", "--ignore=tests/core/extensions")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "outputs", "*.egg-info", "*.html")


def copy_without(names: Collection[str], folder: Path) -> Path:
    """Copy the working tree, as it stands, into a new folder without these extensions and their tests."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    for name in names:
        shutil.rmtree(folder / "core/extensions" / name)
        shutil.rmtree(folder / "tests/core/extensions" / name, ignore_errors=True)  # not every one has tests of its own
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and return pytest's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.without",
        description="Runs the kernel's tests in a copy of the repository without an extension, or without all of them.",
        epilog="All other arguments go to pytest; paths take the place of tests/core.",
    )
    parser.add_argument("name", metavar="NAME|all", choices=["all", *EXTENSIONS], help="a folder of core/extensions")
    args, others = parser.parse_known_args(arguments)
    paths = () if any((ROOT / other.partition("::")[0]).exists() for other in others) else KERNEL
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        code = copy_without(EXTENSIONS if args.name == "all" else [args.name], Path(folder) / "code")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *paths, *others]
        # With bytecode, also where the shell forbids it: tests start processes by the hundred.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.run(command, cwd=code, env={**environment, "PYTHONPATH": str(code)}).returncode


if __name__ == "__main__":
    sys.exit(main())
