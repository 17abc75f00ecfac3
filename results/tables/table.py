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
    "statements": {"__all__": {"says", "headline", "in_readme"}},
    "lab": {"about": True, "prepare": True, "measures": {"__all__": {"unit"}}},
}
Numbers = Mapping[str, Any]  # results/tables/<id>.json; values: measure -> arm -> a number a seed


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Paper(Part):
    title: str
    table: str
    link: str
    unit: str
    note: str = ""  # which numbers are left out, and why
    data: tuple[str, ...] = ()  # commands that make the data of the paper's size
    needs: str = "nothing else"  # what a person starts before them


class Row(Part):
    label: str = Field(max_length=74)  # the picture has room for no more
    paper: float | None = None
    against: str = ""  # the row that it is compared with
    script: str = ""
    keys: tuple[str, ...] = ()
    lab_keys: tuple[str, ...] = ()  # in the miniature alone
    sweep: tuple[str, ...] | None = None  # values of lab.sweep.key for this row alone


class Statement(Part):
    says: str  # in the direction of row less against, whose sign the pages show
    row: str
    against: str = ""  # 0 if empty: the measure is a difference by itself
    expects: Literal["above", "below", "equal"]
    margin: float = 0.0  # of equal, in points
    measure: str = ""  # the first one if empty
    headline: bool = False  # stands in the README's picture
    in_readme: bool = False  # is a line of the README's table


class Measure(Part):
    """A number of a run in percent: a metric's mean over its last validations, or over all.

    A function, named ``module:name``, takes the rows of ``metrics.jsonl`` and returns it instead.
    """

    metric: str | None = None
    function: str | None = None
    over: str = Field("last 1", pattern=r"^(all|last [1-9]\d*)$")
    unit: str = "points"  # of a difference


class Sweep(Part):
    """A key that the paper sets for another scale.

    The first row's best value is every row's. A row with values of its own takes its own best.
    """

    key: str
    values: tuple[str, ...] = ()
    # Other ones than those of the rows, where one row is swept for all: it would win by its luck
    seeds: tuple[int, ...] = (201, 202)


class Lab(Part):
    """The miniature. ``{seeds}`` in a command of ``prepare`` stands for those that are missing."""

    about: str
    preset: str
    seeds: int = Field(ge=2)
    measures: dict[str, Measure] = Field(min_length=1)
    prepare: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    sweep: Sweep | None = None
    controls: tuple[Literal["again", "rewards_of_others"], ...] = ()


class Table(Part):
    """A checked file. Controls are compared with the first row."""

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
    def digest(self) -> str:
        content = json.dumps(self.model_dump(exclude=WORDS, exclude_none=True), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def compared(self) -> dict[str, str]:
        """The rows and controls that are compared with a row, each with that one."""
        rows = {name: row.against for name, row in self.rows.items() if row.against}
        return rows | dict.fromkeys(self.lab.controls, next(iter(self.rows)))

    def numbers(self) -> Numbers | None:
        """Return the committed numbers; None if there are none of this version of the file."""
        path = PAGES / f"{self.id}.json"
        numbers = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return numbers if numbers.get("digest") == self.digest else None

    def paper_gap(self, row: str, against: str, measure: str = "") -> float | None:
        """Return the difference in the paper, of the first measure; None if it is unknown."""
        if measure or not against:
            return None
        here, there = (self.rows[name].paper for name in (row, against))
        return None if here is None or there is None else here - there

    def gap(self, numbers: Numbers, row: str, against: str, measure: str = "") -> Estimate:
        """Return the difference in points, paired by seed, with Student's 95 % interval."""
        values = numbers["values"][measure or next(iter(self.lab.measures))]
        others = values[against] if against else [0.0] * len(values[row])
        return t_interval([a - b for a, b in zip(values[row], others, strict=True)])

    def unit(self, measure: str = "") -> str:
        """Return the unit of a measure's differences, of the first one by default."""
        return self.lab.measures[measure or next(iter(self.lab.measures))].unit

    def fails(self, numbers: Numbers, control: str) -> bool:
        """Return whether a control contradicts its expectation.

        ``again`` must not differ from the first row, ``rewards_of_others`` must end below it.
        """
        gap = self.gap(numbers, control, next(iter(self.rows)))
        if control == "rewards_of_others":
            return gap.high >= 0
        error = (gap.high - gap.value) / t_quantile(gap.n - 1)
        return error > 0 and 1 - t_probability(abs(gap.value) / error, gap.n - 1) < AGAIN_P

    def verdict(self, numbers: Numbers, statement: Statement) -> str:
        """Return whether a statement holds, fails or is not seen, by a rule fixed before the runs.

        A direction holds if the interval lies on the expected side of 0 and fails if it lies on the
        other side. Equality holds if it lies within the margin and fails if it lies outside.
        """
        if any(self.fails(numbers, control) for control in self.lab.controls):
            return "no verdict: a control failed"
        margin = statement.margin
        gap = self.gap(numbers, statement.row, statement.against, statement.measure)
        above, below = gap.low > margin, gap.high < -margin
        if statement.expects == "equal":
            holds, fails = -margin < gap.low and gap.high < margin, above or below
        else:
            holds, fails = (above, below) if statement.expects == "above" else (below, above)
        return "holds" if holds else "fails" if fails else "not seen"


def tables_of(recipe: str = "*") -> list[Table]:
    """Return a paper's tables, or all. Raises InputError for none, or for a wrong file."""
    if not (paths := sorted(ROOT.glob(f"recipes/{recipe}/tables/*.yaml"))):
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
        problems = []
        for one in error.errors():
            fix = {"extra_forbidden": "remove it", "missing": "add it"}.get(
                one["type"], "change it"
            )
            key = ".".join(map(str, one["loc"]))
            problems.append(f"{key}={one['input']!r:.60}: {one['msg']}; {fix}")
    if problems:
        raise InputError([f"{path}: {problem}" for problem in problems])
    return table


def contradictions(table: Table) -> Iterator[str]:
    """Yield what the fields say of each other that cannot be."""
    for name, row in table.rows.items():
        if row.against not in ("", *table.rows):
            yield f"rows.{name}.against={row.against}: is no row; name one"
        for key in (*row.keys, *row.lab_keys):
            if not re.match(r"[\w.]+=", key):
                yield f"rows.{name}.keys={key}: is no key=value; correct it"
        if row.sweep and not (table.lab and table.lab.sweep):
            yield f"rows.{name}.sweep={row.sweep[0]}: has no key; name it in lab.sweep.key"
    for name, measure in table.lab.measures.items() if table.lab else ():
        if (measure.metric is None) == (measure.function is None):
            yield f"lab.measures.{name}: has a metric or a function; name one of the two"
    for number, each in enumerate(table.statements):
        for name in {each.row, each.against} - {"", *table.rows}:
            yield f"statements.{number}={name}: is no row; name one"
        if not each.against and not each.measure:
            yield f"statements.{number}.against: is empty; name a row, or a measure"
        if (each.expects == "equal") != (each.margin > 0):
            yield f"statements.{number}.margin={each.margin:g}: belongs to equal alone; change it"
        if not table.lab or each.measure not in ("", *table.lab.measures):
            yield f"statements.{number}.measure={each.measure}: is not in lab.measures; add it"
