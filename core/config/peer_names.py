"""Names of verl's program, of TRL, OpenRLHF and Search-R1, and what stands for each here.

The tables are in ``peer_names.yaml``. ``core/config/COMING_FROM.md`` shows them; where a name of a table that people
type is typed as a key, it is answered from here; and ``--help`` searches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.config.yaml_tables import read_table

TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Names:
    """A table: name -> what stands for it here, with keys, metrics and files in backticks.

    kind: ``keys`` are typed on a command line, ``program`` are classes and functions, ``metrics`` are logged.
    """

    title: str
    project: str
    kind: str
    names: dict[str, str]


def tables() -> Iterator[Names]:
    """Yield the tables in the order of the page."""
    yield from (Names(**entry) for entry in read_table(TABLE))


def advice(name: str) -> tuple[str, str] | None:
    """Return rule and fix for another project's key that was typed, with or without dashes; None for any other."""
    bare = name.lstrip("-").replace("-", "_")
    found = [one for one in tables() if one.kind != "metrics" and bare in one.names]
    if not found:
        return None
    texts = dict.fromkeys(one.names[bare].replace("`", "") for one in found)
    return f"is a name of {' and '.join(dict.fromkeys(one.project for one in found))}", f"here: {'; or '.join(texts)}"
