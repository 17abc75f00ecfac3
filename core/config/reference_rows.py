"""The published number that a run is meant to reproduce: ``trainer.reference`` names a row of results/references.yaml.

A row fixes the settings that decide its result. Here a configuration is compared with them: an unknown row is refused,
and each setting that differs is a warning before anything runs. ``results.reporting.references`` applies the same
comparison to recorded runs. The file is read as data; nothing of ``results`` is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import convert
from core.config.problem import Problem, show
from core.config.schema import Config
from core.config.yaml_files import read_table

KEY, MODEL = "trainer.reference", "actor_rollout_ref.model.path"
TABLE = Path(__file__).resolve().parents[2] / "results" / "references.yaml"


@dataclass(frozen=True)
class Departure:
    """A setting that differs from the row's. ``why`` is the row's reason to allow it, None where it does not."""

    key: str
    here: Any
    there: Any
    why: str | None = None

    def __str__(self) -> str:
        return f"{self.key} is {show(self.here)} here, {show(self.there)} there"


def rows(path: Path = TABLE) -> dict[str, Mapping[str, Any]]:
    """Return the rows by id; none where the file is absent, as in an installed package."""
    return {row["id"]: row for row in read_table(path)["references"]} if path.exists() else {}


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the three ids that are spelled most like the name."""
    return difflib.get_close_matches(name, known, n=3, cutoff=0.0)


def unknown(name: str, known: Sequence[str]) -> Problem:
    """Return the problem of an id that no row has."""
    fix = f"the nearest ids are {', '.join(nearest(name, known))}" if known else f"it has no rows, or {TABLE} is absent"
    return Problem(KEY, name, "results/references.yaml has no row of this id", fix)


def departures(row: Mapping[str, Any], recipe: str, flat: Mapping[str, Any]) -> list[Departure]:
    """Return what differs from the row, in the row's order. ``flat`` is a configuration as flat key -> value."""
    departed = [] if recipe == row["recipe"] else [Departure("the recipe", recipe, row["recipe"])]
    allowed = {(one["key"], _plain(one["here"])): one["why"] for one in row.get("departures", ()) if "key" in one}
    for key, there in {MODEL: row["model"], **row.get("settings", {})}.items():
        here = flat.get(key)
        if _plain(here) != _plain(there):
            departed.append(Departure(key, here, there, allowed.get((key, _plain(here)))))
    return departed


def check(recipe: str, config: Config, path: Path = TABLE) -> tuple[list[Problem], list[str]]:
    """Return the problem of a row that does not exist, and a warning for each setting that differs from the row's."""
    name, known = config.trainer.reference, rows(path) if config.trainer.reference else {}
    if name is None:
        return [], []
    if name not in known:
        return [unknown(name, list(known))], []
    differing = [one for one in departures(known[name], recipe, convert.flat(config)) if one.why is None]
    return [], [f"reference {name}: {one}" for one in differing]


def _plain(value: Any) -> str:
    """Return one text for equal values: 1 and 1.0, a tuple and a list."""
    return show(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)
