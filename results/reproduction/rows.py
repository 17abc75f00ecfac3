"""The tables that ``reproduce.sh`` repeats, as ``recipes/<recipe>/reproduce.yaml`` names them, and their rows.

Nothing is run here. What is done for a row is in :mod:`results.reproduction.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from core.errors import InputError
from core.tracking.run_manifest import ROOT
from results.reporting.reference_logs import read_references

LAB = "lab-repeated"
SPECIAL = ("released", "lab")  # in the place of a table
DECODING = "actor_rollout_ref.rollout.val_kwargs.do_sample"


@dataclass(frozen=True)
class Row:
    """A row of a table: the command that trains or evaluates it, or the released model that stands in its place.

    named: a row of references.yaml, which what is measured is to name.
    needs_service: training and answering need the service of the recipe.
    sampled: the reported number is one of sampled answers, not of greedy ones.
    """

    recipe: str
    name: str
    command: str
    reported: str
    cost: str
    named: bool = False
    released: str | None = None
    needs_service: bool = False
    sampled: bool = True


def read_tables(recipe: str) -> Mapping[str, Any]:
    """Return what ``recipes/<recipe>/reproduce.yaml`` holds. Raises InputError for another recipe."""
    path = ROOT / "recipes" / recipe / "reproduce.yaml"
    if not path.exists():
        known = ", ".join(sorted(one.parent.name for one in ROOT.glob("recipes/*/reproduce.yaml")))
        raise InputError(f"{recipe}: has no reproduce.yaml; choose one of {known}")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rows_of(recipe: str, table: str, wanted: Sequence[str]) -> list[Row]:
    """Return the rows of a table that can be repeated, or those ``wanted``.

    Raises:
        InputError: the table or a row is unknown, or a wanted row cannot be repeated.
    """
    found, references = read_tables(recipe), {one["id"]: one for one in read_references(ROOT / "results")["references"]}
    names = [*found["tables"], *(name for name in SPECIAL if name in found)]
    if table not in names:
        raise InputError(f"table={table}: is not a table of {recipe}; choose one of {', '.join(names)}")
    service = found.get("service", {"tables": ()})
    without = service.get("without", ()) if table in service["tables"] else None

    def needs(name: str) -> bool:
        return without is not None and name not in without

    if table == "lab":
        lab = found["lab"]
        rows = [Row(recipe, LAB, lab["command"], "the published seeds, in results/README.md", lab["takes"])]
    elif table == "released":
        rows = [_released(recipe, references[name], needs(name)) for name in found["released"]]
    else:
        rows = [
            _own(recipe, one, needs(one["id"]))
            if isinstance(one, Mapping)
            else _referenced(recipe, references[one], needs(one))
            for one in found["tables"][table]["rows"]
        ]
    known = {row.name: row for row in rows}
    for name in wanted:
        if name not in known:
            raise InputError(f"row={name}: is not in {table} of {recipe}; choose one of {', '.join(known)}")
        if not known[name].command:
            raise InputError(f"row={name}: cannot be repeated: {references[name]['not_reproducible']}")
    return [known[name] for name in wanted] or [row for row in rows if row.command]


def _reported(row: Mapping[str, Any]) -> str:
    return f"{row['value']:.1f} ({row['source']})"


def _released(recipe: str, row: Mapping[str, Any], needs_service: bool) -> Row:
    reported, cost = _reported(row), "an evaluation"
    return Row(recipe, row["id"], row["command"], reported, cost, True, row["released"], needs_service)


def _referenced(recipe: str, row: Mapping[str, Any], needs_service: bool) -> Row:
    command = "" if "not_reproducible" in row else row["command"]
    cost, sampled = "", row.get("settings", {}).get(DECODING, False)
    return Row(recipe, row["id"], command, _reported(row), cost, True, None, needs_service, sampled)


def _own(recipe: str, entry: Mapping[str, Any], needs_service: bool) -> Row:
    reported = f"none; it departs from the paper: {entry['departs']}"
    return Row(recipe, entry["id"], entry["command"], reported, "", needs_service=needs_service)


def overview(recipe: str) -> str:
    """Return the tables of a recipe, a line each, with their rows."""
    found = read_tables(recipe)
    lines = [f"bash recipes/{recipe}/reproduce.sh TABLE [ROW ...]        DRY_RUN=1 prints the stages"]
    for name, table in found["tables"].items():
        rows = [one if isinstance(one, str) else one["id"] for one in table["rows"]]
        lines += [f"{name}: {table['title']}", *(f"  {row}" for row in rows)]
    if "released" in found:
        lines += ["released: evaluates what the authors released", *(f"  {row}" for row in found["released"])]
    return "\n".join([*lines, f"lab: the recipe on a laptop, {found['lab']['takes']}"])
