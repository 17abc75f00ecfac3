"""The shared trainer, and the packages that its loop goes through (README.md beside this file)."""

import sys

# Of pyproject.toml's requires-python; this file keeps to the syntax of older versions
OLDEST = (3, 11)
FIX = "type make setup, then source .venv/bin/activate"


def report(kind, error, traceback, before=sys.excepthook):
    """Print one line for a package that is not installed, and any other error as Python does."""
    package = (getattr(error, "name", None) or "").split(".")[0]
    if kind is ModuleNotFoundError and package not in sys.modules:
        print(f"{package}: is not installed for {sys.executable}; {FIX}", file=sys.stderr)
    else:
        before(kind, error, traceback)


if sys.version_info[:2] < OLDEST:
    sys.exit(
        f"Python {sys.version_info[0]}.{sys.version_info[1]}: this repository needs 3.11 to "
        f"3.14; {FIX}"
    )
if sys.argv[:1] == ["-m"]:  # while python -m looks for its module
    sys.excepthook = report

from core.python_api import train  # noqa: E402, which older versions of Python cannot read

__all__ = ["train"]
