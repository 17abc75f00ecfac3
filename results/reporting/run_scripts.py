"""What the run scripts ``recipes/*/run_*.sh`` would start.

A script's settings are read by running it with bash, where ``exec`` is a function that prints its
words: in a dry run the last thing that each script does is to ``exec`` its Python. Nothing is
started, and Python loads once for all of them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config.composition import compose
from core.config.schema import Config
from core.errors import InputError

PRINT_WORDS = """
exec() { if [[ $1 == bash ]]; then builtin exec "$@"; fi; printf '%s\\0' "$@"; exit 0; }
export -f exec
source "$0"
"""


@dataclass(frozen=True)
class Script:
    """A run script: the recipe that it starts, its own arguments, and its configuration."""

    path: Path
    recipe: str
    arguments: tuple[str, ...]
    config: Config


def read_script(path: Path, typed: Sequence[str] = ()) -> Script | None:
    """Return what a script starts with these arguments; None where that is no training run.

    Raises:
        InputError: the script fails, or its configuration has problems.
    """
    done = subprocess.run(
        ["bash", "-c", PRINT_WORDS, str(path), *typed],
        env={**os.environ, "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    words = done.stdout.split("\0")[:-1]
    if done.returncode or words[1:2] != ["-m"]:
        raise InputError(
            f"{path}: its dry run does not end in exec python -m ...: {done.stderr.strip()[:200]}"
        )
    package, _, module = words[2].rpartition(".")
    recipe = package.rpartition(".")[2]
    if module != f"main_{recipe}":
        return None
    arguments = tuple(word for word in words[3:] if word != "--")
    # After -- a preset beats the script's own keys.
    return Script(path, recipe, arguments, compose(recipe, words[3:]))
