"""Reading YAML: this program's own tables, and files of runs and users. Recipes' configurations are Hydra's to read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where it is compiled in: ten times as fast


def read_yaml(text: str) -> Any:
    """Return what a YAML text holds. Raises ValueError where it is no YAML."""
    try:
        return yaml.load(text, LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"no YAML ({' '.join(str(error).split())})") from error


@functools.cache
def read_table(path: Path) -> Any:
    """Return what a YAML file holds. It is read once a process."""
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)
