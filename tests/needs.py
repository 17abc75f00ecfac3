"""The extensions that tests name in the marker ``needs``, which leaves them out where its folder was deleted."""

from __future__ import annotations

from typing import Any

import pytest

# All that this repository has, so that a misspelt name is told from that of a deleted folder.
EXTENSIONS = (
    *("call_formats", "capsules", "environments", "evaluation", "judge", "planning", "remote", "sglang"),
    *("tensor_parallel", "tools", "trace", "variants", "verl_classes", "verl_data", "verl_keys", "vision"),
)


def needing(extension: str, *values: Any) -> list[Any]:
    """Return parameters of a test, of which each has the mark."""
    return [pytest.param(value, marks=pytest.mark.needs(extension)) for value in values]
