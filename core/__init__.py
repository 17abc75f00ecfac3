"""What two recipes share: one trainer, and the packages that its loop goes through (README.md beside this file).

Every package with commands imports this one. ``python -m <command>`` then ends in one line where Python is too old or a
package is missing; any other error keeps its traceback. Standard library alone, in the syntax of old versions.
"""

import os
import sys
from importlib.util import find_spec

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST, TOO_NEW = (3, 11), (3, 13)  # pyproject.toml's requires-python


class UnsupportedPython(ImportError):
    """The interpreter is older than the syntax of this repository."""


def wrong_python():
    """Return the line for this interpreter, or None where its version is supported."""
    if OLDEST <= sys.version_info[:2] < TOO_NEW:
        return None
    version = ".".join(map(str, sys.version_info[:2]))
    fix = "type make setup PYTHON=python3.12, then source .venv/bin/activate"
    return f"Python {version}: this repository needs 3.11 or 3.12; {fix}"


def explanation(error, traceback):
    """Return the line for a failed import of a package that is not installed, or None for any other error."""
    if isinstance(error, UnsupportedPython):
        return str(error)
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    file = traceback.tb_frame.f_code.co_filename if traceback is not None else ""
    ours = file.startswith(ROOT + os.sep) and not file.startswith(os.path.join(ROOT, ".venv"))
    if not ours or not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").split(".")[0]
    if os.path.exists(os.path.join(ROOT, package)) or package in sys.modules or find_spec(package) is not None:
        return None
    venv = os.path.join(ROOT, ".venv")
    fix = "type make setup, then source .venv/bin/activate"
    if os.path.exists(os.path.join(venv, ".installed")) and os.path.realpath(sys.prefix) == os.path.realpath(venv):
        fix = "type .venv/bin/python -m pip install with its requirement of pyproject.toml"
    return wrong_python() or f"{package}: is not installed for {sys.executable}; {fix}"


def report(kind, error, traceback, before=sys.excepthook):
    """Print an uncaught exception, as one line where there is one for it."""
    line = explanation(error, traceback)
    if line is None:
        before(kind, error, traceback)
    else:
        print(line, file=sys.stderr)


if sys.argv[:1] == ["-m"]:  # while python -m looks for its module
    sys.excepthook = report
if sys.version_info[:2] < OLDEST:
    raise UnsupportedPython(wrong_python())
