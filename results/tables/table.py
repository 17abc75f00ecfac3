"""A paper's table as one file, and the rule that turns the numbers of its miniature into verdicts.

``recipes/<paper>/tables/<name>.yaml`` holds the paper's rows, its statements in a form that can
fail, and the miniature that tests them. :mod:`results.tables.runner` runs a table,
:mod:`results.tables.page` writes its page.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.errors import InputError
from core.tracking.run_manifest import ROOT
from core.tracking.validation import Estimate, t_interval, t_probability, t_quantile

PAGES = ROOT / "results" / "tables"
AGAIN_P = 0.01  # `again` fails below: at 0.05 one table in twenty would fail by chance
WORDS = {  # fields that decide neither numbers nor verdicts
    "paper": True,
    "rows": {"__all__": {"label", "paper", "script"}},
    "statements": {"__all__": {"says", "headline"}},
    "lab": {"about", "prepare"},
}
Keys = tuple[str, ...]
Numbers = Mapping[str, Any]  # results/tables/<id>.json; values: measure -> arm -> a number a seed


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Paper(Part):
    """Where the numbers stand, and what the paper's size needs beside the rows' scripts."""

    title: str
    table: str
    link: str
    unit: str
    note: str = ""  # which numbers are left out, and why
    data: tuple[str, ...] = ()  # commands that make the data
    needs: str = "nothing else"  # what a person starts


class Pair(Part):
    says: str
    row: str
    against: str
    measure: str = ""  # the first one if empty


class Row(Part):
    """A row of the paper. ``keys`` change both scales, ``lab_keys`` the miniature alone."""

    label: str
    paper: float | None = None
    against: str = ""  # the row that it is compared with
    script: str = ""
    keys: Keys = ()
    lab_keys: Keys = ()


class Statement(Pair):
    expects: Literal["above", "below", "equal"]
    margin: float = 0.0  # of equal, in points
    headline: bool = False  # a line of the top README


class Measure(Part):
    """A number of a run in percent: a metric's mean over its last validations, or over all."""

    metric: str
    over: str = Field("last 1", pattern=r"^(all|last [1-9]\d*)$")


class Lab(Part):
    """The miniature. ``{seeds}`` in a command of ``prepare`` stands for those that are missing."""

    about: str
    preset: str
    seeds: int = Field(ge=2)
    measures: dict[str, Measure] = Field(min_length=1)
    prepare: tuple[str, ...] = ()
    keys: Keys = ()
    controls: tuple[Literal["again", "rewards_of_others"], ...] = ()


class Table(Part):
    """A checked file. The first row is the reference of the controls."""

    recipe: str
    name: str
    paper: Paper
    rows: dict[str, Row] = Field(min_length=1)
    statements: tuple[Statement, ...] = ()
    lab: Lab | None = None

    @property
    def id(self) -> str:
        return f"{self.recipe}-{self.name}"

    @property
    def command(self) -> str:
        return f"bash recipes/{self.recipe}/reproduce.sh {self.name}"

    @property
    def first_row(self) -> str:
        return next(iter(self.rows))

    @property
    def pairs(self) -> dict[str, Pair]:
        """Each row and control that is compared with another row, with that one."""
        controls = self.lab.controls if self.lab else ()
        compared = {name: (row.label, row.against) for name, row in self.rows.items()}
        compared |= {name: (f"control: {name}", self.first_row) for name in controls}
        return {
            name: Pair(says=f"{label} (from {against})", row=name, against=against)
            for name, (label, against) in compared.items()
            if against
        }

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude=WORDS).encode()).hexdigest()[:16]

    def numbers(self) -> Numbers | None:
        """Return the committed numbers; None if there are none of this version of the file."""
        path = PAGES / f"{self.id}.json"
        numbers = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return numbers if numbers.get("digest") == self.digest else None

    def paper_gap(self, pair: Pair) -> float | None:
        """Return the difference in the paper, of the first measure; None if it is unknown."""
        rows = [self.rows.get(name) for name in (pair.row, pair.against)]
        if pair.measure or None in rows or None in (numbers := [row.paper for row in rows]):
            return None
        return numbers[0] - numbers[1]

    def gap(self, numbers: Numbers, pair: Pair) -> Estimate:
        """Return the pair's difference in points, paired by seed, with Student's 95 % interval."""
        values = numbers["values"][pair.measure or next(iter(self.lab.measures))]
        return t_interval(
            [a - b for a, b in zip(values[pair.row], values[pair.against], strict=True)]
        )

    def failed_controls(self, numbers: Numbers) -> list[str]:
        """Return the controls that contradict their expectation.

        ``again`` must not differ from the first row, ``rewards_of_others`` must end below it.
        """
        failed = []
        for name in self.lab.controls:
            gap = self.gap(numbers, self.pairs[name])
            error = (gap.high - gap.value) / t_quantile(gap.n - 1)
            if name == "rewards_of_others":
                wrong = gap.high >= 0
            else:
                wrong = error > 0 and 1 - t_probability(abs(gap.value) / error, gap.n - 1) < AGAIN_P
            failed += [name] * wrong
        return failed

    def verdict(self, numbers: Numbers, statement: Statement) -> str:
        """Return whether a statement holds, fails or is not seen, by a rule fixed before the runs.

        A direction holds if the interval lies on the expected side of 0 and fails if it lies on the
        other side. Equality holds if it lies within the margin and fails if it lies outside.
        """
        if self.failed_controls(numbers):
            return "no verdict: a control failed"
        gap, margin = self.gap(numbers, statement), statement.margin
        above, below = gap.low > margin, gap.high < -margin
        within = -margin < gap.low and gap.high < margin
        holds, fails = {
            "above": (above, below),
            "below": (below, above),
            "equal": (within, above or below),
        }[statement.expects]
        return "holds" if holds else "fails" if fails else "not seen"


def tables_of(recipe: str = "*") -> list[Table]:
    """Return a paper's tables, or all. Raises InputError for none, or for a wrong file."""
    paths = sorted(ROOT.glob(f"recipes/{recipe}/tables/*.yaml"))
    if not paths:
        known = sorted({path.parts[-3] for path in ROOT.glob("recipes/*/tables/*.yaml")})
        raise InputError(f"recipe={recipe}: has no tables; choose one of {', '.join(known)}")
    return [read_table(path) for path in paths]


def read_table(path: Path) -> Table:
    """Return a file's table. Raises InputError, a line a problem: file, key, value, rule, fix."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = Table(**{"recipe": path.parts[-3], "name": path.stem, **content})
        problems = list(contradictions(table))
    except (yaml.YAMLError, TypeError) as error:
        problems = [f"is no mapping in YAML ({' '.join(str(error).split())}); correct it"]
    except ValidationError as error:
        fixes = {"extra_forbidden": "remove it", "missing": "add it"}
        problems = [
            f"{'.'.join(map(str, one['loc']))}={one['input']!r:.60}: {one['msg']}; "
            f"{fixes.get(one['type'], 'change it')}"
            for one in error.errors()
        ]
    if problems:
        raise InputError([f"{path}: {problem}" for problem in problems])
    return table


def contradictions(table: Table) -> Iterator[str]:
    """Yield what the fields say of each other that cannot be."""
    statements = {f"statements.{n}": each for n, each in enumerate(table.statements)}
    for place, pair in {**table.pairs, **statements}.items():
        for name in {pair.row, pair.against} - {*table.rows, *table.pairs}:
            yield f"{place}={name}: is no row; choose one of {', '.join(table.rows)}"
    for place, statement in statements.items():
        if (statement.expects == "equal") != (statement.margin > 0):
            yield f"{place}.margin={statement.margin:g}: belongs to equal alone; change it"
        if not table.lab or statement.measure not in ("", *table.lab.measures):
            yield f"{place}.measure={statement.measure}: is not in lab.measures; add it there"
    for name, row in table.rows.items():
        for key in (*row.keys, *row.lab_keys):
            if not re.match(r"[\w.]+=", key):
                yield f"rows.{name}.keys={key}: is no key=value; correct it"
