"""Reading YAML: this program's own tables, and files of others.

The tables are part of the program. What a run or a user's file holds is read within limits (:func:`read_foreign_yaml`):
a few lines of aliases can stand for more values than any memory holds. Recipes' configurations are Hydra's to read.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where it is compiled in: ten times as fast


MOST_BYTES, MOST_VALUES = 2**20, 100_000  # of a file of others; a run's config.yaml has 15 kB and 400 values


def read_foreign_yaml(text: str) -> Any:
    """Return what a YAML text holds that somebody else may have written.

    Raises:
        ValueError: no YAML, or larger than any configuration, once its aliases are what they stand for.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} characters of YAML: no configuration has more than {MOST_BYTES}")
    loader = LOADER(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (size := _size(node, {})) > MOST_VALUES:
            raise ValueError(f"{size:.3g} values, with aliases: no configuration has more than {MOST_VALUES}")
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"no YAML ({' '.join(str(error).split())})") from error
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Return how many values a node stands for, aliases included. Infinity for one that holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is known: a node below itself would be visited without end
        parts = node.value if not isinstance(node, yaml.ScalarNode) else ()
        parts = [one for pair in parts for one in pair] if isinstance(node, yaml.MappingNode) else parts
        known[id(node)] = 1 + sum(_size(one, known) for one in parts)
    return known[id(node)]


@functools.cache
def read_table(path: Path) -> Any:
    """Return what a YAML file holds. It is read once a process."""
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)
