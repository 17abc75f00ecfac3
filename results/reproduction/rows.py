"""The tables that ``reproduce.sh`` repeats, as ``recipes/<recipe>/reproduce.yaml`` names them, and
their rows.

Nothing is run here. What is done for a row is in :mod:`results.reproduction.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import ProxyHandler, build_opener

import yaml

from core.errors import InputError
from core.tracking.run_manifest import ROOT
from results.reporting.references import read_references

LAB = "lab-repeated"
SPECIAL = ("released", "lab")  # in the place of a table


@dataclass(frozen=True)
class Row:
    """A row of a table: the command that trains or evaluates it, or the released model that stands
    in its place.

    named: a row of references.yaml, which what is measured is to name.
    needs_service: training and answering need the service of the recipe.
    """

    recipe: str
    name: str
    command: str
    reported: str
    named: bool = False
    released: str | None = None
    needs_service: bool = False


def read_tables(recipe: str) -> Mapping[str, Any]:
    """Return what ``recipes/<recipe>/reproduce.yaml`` holds. Raises InputError for another
    recipe."""
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
    found, references = (
        read_tables(recipe),
        {one["id"]: one for one in read_references(ROOT / "results")["references"]},
    )
    names = [*found["tables"], *(name for name in SPECIAL if name in found)]
    if table not in names:
        raise InputError(
            f"table={table}: is not a table of {recipe}; choose one of {', '.join(names)}"
        )
    if table == "lab":
        rows = [
            Row(recipe, LAB, found["lab"]["command"], "the published seeds, in results/README.md")
        ]
    elif table == "released":
        rows = [_referenced(recipe, references[name], released=True) for name in found["released"]]
    else:
        rows = [
            _own(recipe, one) if isinstance(one, Mapping) else _referenced(recipe, references[one])
            for one in found["tables"][table]["rows"]
        ]
    known = {row.name: row for row in rows}
    for name in wanted:
        if name not in known:
            raise InputError(
                f"row={name}: is not in {table} of {recipe}; choose one of {', '.join(known)}"
            )
        if not known[name].command:
            raise InputError(
                f"row={name}: cannot be repeated: {references[name]['not_reproducible']}"
            )
    return [known[name] for name in wanted] or [row for row in rows if row.command]


def _referenced(recipe: str, row: Mapping[str, Any], released: bool = False) -> Row:
    return Row(
        recipe,
        row["id"],
        command="" if "not_reproducible" in row else row["command"],
        reported=f"{row['value']:.1f} ({row['source']})",
        named=True,
        released=row["released"] if released else None,
        needs_service=_needs_service(recipe, row["id"]),
    )


def _own(recipe: str, entry: Mapping[str, Any]) -> Row:
    reported = f"none; it departs from the paper: {entry['departs']}"
    return Row(
        recipe,
        entry["id"],
        entry["command"],
        reported,
        needs_service=_needs_service(recipe, entry["id"]),
    )


def overview(recipe: str) -> str:
    """Return the tables of a recipe, a line each, with their rows."""
    found = read_tables(recipe)
    lines = [
        f"bash recipes/{recipe}/reproduce.sh TABLE [ROW ...]        DRY_RUN=1 prints the stages"
    ]
    for name, table in found["tables"].items():
        rows = [one if isinstance(one, str) else one["id"] for one in table["rows"]]
        lines += [f"{name}: {table['title']}", *(f"  {row}" for row in rows)]
    if "released" in found:
        lines += [
            "released: evaluates what the authors released",
            *(f"  {row}" for row in found["released"]),
        ]
    return "\n".join([*lines, f"lab: the recipe on a laptop, {found['lab']['takes']}"])


# --- the server that rows need ---


@dataclass(frozen=True)
class Service:
    """A server that stages of a recipe need, such as Search-R1's retriever. ``start`` is how a
    person starts it."""

    name: str
    key: str
    url: str
    start: str

    def require(self) -> None:
        """Raise InputError where nothing answers at its address, or something else does."""
        why = "nothing answers there"
        try:
            # No proxy: one of the environment must not come between this and the loopback.
            with build_opener(ProxyHandler({})).open(self.url, timeout=5.0):
                return
        except HTTPError as error:
            why = f"it answers with status {error.code}"
        except (OSError, ValueError):  # no connection, no HTTP, or no address
            pass
        fix = (
            f"start the {self.name} in another shell ({self.start}), or name its address: -- "
            f"{self.key}=URL"
        )
        raise InputError(f"{self.key}={self.url}: {why}; {fix}")


def _needs_service(recipe: str, row: str) -> bool:
    return row not in read_tables(recipe).get("service", {"without": [row]})["without"]


def service_of(recipe: str, typed: Sequence[str]) -> Service | None:
    """Return the service that ``reproduce.yaml`` names; None without one, and where its key is
    typed as null."""
    entry = read_tables(recipe).get("service")
    if entry is None:
        return None
    url = entry["url"]
    for word in typed:
        key, _, value = word.partition("=")
        if key == entry["key"]:
            if value in ("null", "None"):
                return None
            url = urljoin(value.strip("'\""), entry["url"].rpartition("/")[2])
    return Service(entry["name"], entry["key"], url, entry["start"])
