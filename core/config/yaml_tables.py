"""Reading the YAML files that hold this package's tables: rules, unused keys, other versions' keys, changed defaults.

They are part of the program, unlike the configurations of recipes and runs, which Hydra and ``from_yaml`` read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where it is compiled in: ten times as fast


@functools.cache
def read_table(path: Path) -> Any:
    """Return what a YAML file holds. It is read once a process."""
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)


def entries(table: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield a table's entries. One with ``each`` stands for its own ``entries``, once for each set of texts there."""
    for entry in table:
        for texts in entry.get("each", ()):
            yield from (_filled(one, texts) for one in entry["entries"])
        if "each" not in entry:
            yield entry


def _filled(value: Any, texts: Mapping[str, str]) -> Any:
    """Return the value with every ``<name>`` in it replaced by the text of that name."""
    if isinstance(value, Mapping):
        return {key: _filled(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, texts) for item in value]
    return functools.reduce(lambda filled, name: filled.replace(f"<{name}>", texts[name]), texts, value)


@dataclass(frozen=True)
class ChangedDefault:
    """A key, verl's default, the one here, and the reason."""

    key: str
    verl: Any
    here: Any
    why: str


CHANGED_DEFAULTS = tuple(
    ChangedDefault(**entry) for entry in read_table(Path(__file__).with_name("changed_defaults.yaml"))
)
