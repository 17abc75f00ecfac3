"""The files of an earlier commit, for benchmarks of before and after."""

from __future__ import annotations

import subprocess
from pathlib import Path

from core.tracking.run_manifest import ROOT


def export(commit: str, tree: Path) -> None:
    """Write a commit's files into the new folder ``tree``. Raises CalledProcessError for an unknown commit."""
    tree.mkdir()
    packed = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", tree], input=packed, check=True)
