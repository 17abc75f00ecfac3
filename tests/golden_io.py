"""Reading golden vectors: inputs and outputs of public implementations, from ``GOLDEN_DIR``
(default tests/golden).

Which file is compared with which function stands in ``tests/golden_adapters.py``.
"""

from __future__ import annotations

import builtins
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Case:
    """One vector. ``expected`` is by precision: "f64", "f32", or "" where the file has only one."""

    file: str
    name: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    expected: dict[str, Any]

    def want(self, precision: str) -> Any:
        return self.expected.get(precision, self.expected.get("f64", self.expected.get("")))


@dataclass(frozen=True)
class Comparison:
    """An output beside what it should be. ``where`` limits it to some entries.

    ``departure`` is the reason why ``expected`` is not the published value but the one that is
    returned here.
    """

    name: str
    actual: Any
    expected: Any
    tolerance: float
    where: Any = None
    departure: str = ""


@dataclass
class Outcome:
    """What one case came to: the largest deviation, relative where values are above one, and the
    departures."""

    deviation: float = 0.0
    departures: dict[str, str] = field(default_factory=dict)


def golden_dir() -> Path:
    return Path(os.environ.get("GOLDEN_DIR") or Path(__file__).parent / "golden")


def golden_files() -> list[str]:
    """Names, without ending, of the vector files in the folder."""
    return sorted(path.stem for path in golden_dir().glob("*.json"))


def load(name: str) -> list[Case]:
    """The cases of a file; none where the folder has no such file."""
    path = golden_dir() / f"{name}.json"
    if not path.is_file():
        return []
    return [_case(name, case) for case in json.loads(path.read_text(encoding="utf-8"))["cases"]]


def _case(file: str, raw: dict[str, Any]) -> Case:
    expected = {
        key.removeprefix("expected").lstrip("_"): value
        for key, value in raw.items()
        if key[:8] == "expected"
    }
    return Case(
        file=file,
        name=raw["name"],
        inputs=_decode(raw.get("inputs") or {}),
        params=_decode(raw.get("params") or {}),
        expected=_decode(expected),
    )


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def check(comparisons: Iterator[Comparison], want: Any) -> Outcome:
    """Compare everything; raises AssertionError with the worst entry where a tolerance is exceeded.

    Where the vector records an exception, one of its type has to come, or a departure.
    """
    outcome = Outcome()
    if isinstance(want, dict) and set(want) == {"error"}:
        name = str(want["error"]).split(":")[0]
        error = ValueError if name == "AssertionError" else getattr(builtins, name, Exception)
        try:
            items = list(comparisons)
        except error:
            return outcome
        assert items and all(item.departure for item in items), (
            f"{error.__name__} was expected, got {items}"
        )
        return Outcome(departures={item.name: item.departure for item in items})
    for item in comparisons:
        deviation = _deviation(item)
        assert deviation <= item.tolerance, (
            f"{item.name} deviates by {deviation:.3g} > {item.tolerance:g}\n"
            f"  got  {np.asarray(item.actual)}\n  want {np.asarray(item.expected)}"
        )
        outcome.deviation = max(outcome.deviation, deviation)
        outcome.departures |= {item.name: item.departure} if item.departure else {}
    return outcome


def _deviation(item: Comparison) -> float:
    """Largest ``|a - b| / max(1, |b|)``; NaN equals NaN, and anything else that is not finite only
    itself."""
    actual = np.asarray(item.actual, dtype=np.float64)
    expected = np.asarray(item.expected, dtype=np.float64)
    assert actual.shape == expected.shape, (
        f"{item.name} has shape {actual.shape}, expected {expected.shape}"
    )
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(actual - expected) / np.maximum(1.0, np.abs(expected)))
    gap = np.where(np.isnan(gap), np.inf, gap)
    if item.where is not None:
        gap = gap[np.asarray(item.where, dtype=bool)]
    return float(gap.max(initial=0.0))
