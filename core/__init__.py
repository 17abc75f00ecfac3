"""The shared trainer, and the packages that its loop goes through (README.md beside this file)."""

import sys
from importlib.util import find_spec

# Of pyproject.toml's requires-python; this file keeps to the syntax of older versions
OLDEST = (3, 11)
FIX = "type make setup, then source .venv/bin/activate"

if sys.version_info[:2] < OLDEST:
    sys.exit(
        f"Python {sys.version_info[0]}.{sys.version_info[1]}: this repository needs 3.11 to "
        f"3.14; {FIX}"
    )
if sys.argv[:1] == ["-m"]:  # while python -m looks for its module
    for package in ("numpy", "pydantic", "yaml"):
        if find_spec(package) is None:
            sys.exit(f"{package}: is not installed for {sys.executable}; {FIX}")

from core.python_api import train  # noqa: E402, which older versions of Python cannot read

__all__ = ["train"]
