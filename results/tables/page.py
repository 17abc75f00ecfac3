"""The pages of papers' tables, ``results/tables/<paper>-<name>.{md,svg}``, and lines of READMEs.

``python -m results.tables.page`` makes them from the tables' files and committed numbers.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from core.files import write_atomic
from core.tracking.run_manifest import ROOT
from core.tracking.validation import Estimate, t_interval
from results.reporting.pages import with_block
from results.tables.table import AGAIN_P, PAGES, Numbers, Statement, Table, tables_of

BLOCK = "tables"  # of READMEs, between two marks
HEADER = (
    "| statement | in the paper | here | verdict | minutes | table: statements that hold |",
    "| --- | --- | --- | --- | --- | --- |",
)
SIZES = re.compile(r"(?<=/README\.md\) \| )\d+(?= \|)")  # lines of Python in recipes/README.md
Made = tuple[Table, Numbers]


def interval(estimate: Estimate, sign: str = "") -> str:
    """Return an estimate with its interval, in tenths; no end but a 0 is rounded to 0."""
    ends = estimate.low, estimate.high
    digits = next((d for d in (1, 2) if all(round(end, d) or not end for end in ends)), 3)
    low, high = (f"{end:{sign}.{digits}f}" for end in ends)
    return f"{estimate.value:{sign}.1f} [{low}, {high}]"


def difference(table: Table, numbers: Numbers, statement: Statement) -> str:
    """Return what a statement is about: a difference, with its unit where that is not points."""
    unit = table.unit(statement.measure)
    gap = table.gap(numbers, statement.row, statement.against, statement.measure)
    return interval(gap, "+") + ("" if unit == "points" else f" {unit}")


def mean(table: Table, measure: str, values: Sequence[float]) -> str:
    """Return the mean over seeds with its interval; a share's lies between 0 and 100 %."""
    estimate = t_interval(values)
    if estimate.low == estimate.high:
        return f"{estimate.value:.1f} in each seed"
    if table.lab.measures[measure].metric and all(0 <= value <= 100 for value in values):
        low, high = max(estimate.low, 0.0), min(estimate.high, 100.0)
        estimate = replace(estimate, low=low, high=high)
    return interval(estimate)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"


def minutes(numbers: Numbers) -> str:
    return f"{numbers['cpu_seconds'] / 60:.0f}"


def fill(template: str, table: Table, numbers: Numbers, **values: object) -> str:
    """Return a template of this folder, filled."""
    return environment().get_template(template).render(table=table, numbers=numbers, **values)


def environment() -> Environment:
    """Return what fills the templates of this folder."""
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    loader = FileSystemLoader(Path(__file__).parent)
    made_of = Environment(loader=loader, undefined=StrictUndefined, **options)
    made_of.filters |= {"interval": interval, "number": number, "minutes": minutes}
    return made_of


def render(table: Table, numbers: Numbers) -> str:
    """Return a table's page."""
    own = {"mean": mean, "again_p": AGAIN_P, "difference": difference}
    return fill("page.md.jinja", table, numbers, **own)


def forest(table: Table, numbers: Numbers) -> str:
    """Return the differences of rows and of `again` as a picture, here and in the paper."""
    compared = {name: row for name, row in table.compared.items() if name != "rewards_of_others"}
    gaps = {name: table.gap(numbers, name, row) for name, row in compared.items()}
    papers = {n: table.paper_gap(n, row) for n, row in compared.items() if n in table.rows}
    ends = [0.0, *(gap.low for gap in gaps.values()), *(gap.high for gap in gaps.values())]
    ends += [gap for gap in papers.values() if gap is not None]
    low, scale = min(ends), 576 / (max(ends) - min(ends) or 1)
    drawn = {"gaps": gaps, "papers": papers, "low": low, "high": max(ends)}
    drawn["x"] = lambda value: round(12 + scale * (value - low), 1)
    return fill("forest.svg.jinja", table, numbers, **drawn)


def statements_picture(made: Sequence[Made]) -> str:
    """Return the headlines of all tables as a picture, by verdict, one below the other.

    Its title counts all statements. Each table has a scale of its own, since points of accuracy and
    of exact match differ in size.
    """
    groups: dict[str, list[dict[str, object]]] = {"holds": [], "fails": [], "not seen": []}
    for table, numbers in made:
        pairs = [(each.row, each.against, each.measure) for each in table.statements]
        gaps = [table.gap(numbers, *pair) for pair in pairs]
        in_paper = [table.paper_gap(*pair) for pair in pairs]
        ends = [abs(end) for gap in gaps for end in (gap.low, gap.high)]
        reach = max([*ends, *(abs(gap) for gap in in_paper if gap is not None)], default=1.0)
        for each, here, paper in zip(table.statements, gaps, in_paper, strict=True):
            verdict = table.verdict(numbers, each)
            if each.headline:
                drawn = {
                    "lines": textwrap.wrap(f"{each.says} ({table.paper.title})", 60),
                    "here": here,
                    "paper": paper,
                    "x": lambda value, reach=reach: round(210 + 194 * value / reach, 1),
                }
                groups.setdefault(verdict, []).append(drawn)
    template = environment().get_template("statements.svg.jinja")
    return template.render(groups=groups, summary=counted(made))


def counted(made: Sequence[Made]) -> str:
    """Return how many statements of the tables got each verdict."""
    counts = counts_by_verdict(made)
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common())
    noun = "statement" if counts.total() == 1 else "statements"
    return f"{counts.total()} {noun} of papers: {verdicts}"


def counts_by_verdict(made: Sequence[Made]) -> Counter[str]:
    return Counter(
        table.verdict(numbers, each) for table, numbers in made for each in table.statements
    )


def statement_lines(
    made: Sequence[Made], folder: str, shown: Callable[[Statement], bool] = lambda each: True
) -> str:
    """Return the table of the statements that are shown; ``folder`` leads to the pages.

    A link says how many of all statements of its page hold.
    """
    lines = [*HEADER]
    for table, numbers in made:
        held = f"{counts_by_verdict([(table, numbers)])['holds']}/{len(table.statements)}"
        link = f"[{table.paper.title}, {table.paper.table}]({folder}{table.id}.md): {held}"
        for each in filter(shown, table.statements):
            pair = each.row, each.against, each.measure
            cells = [each.says, number(table.paper_gap(*pair))]
            cells += [difference(table, numbers, each)]
            cells += [f"**{table.verdict(numbers, each)}**", minutes(numbers), link]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def headline_lines(made: Sequence[Made]) -> str:
    """Return the table of ``results/README.md``: the headlines, and the count of all statements."""
    lines = statement_lines(made, "tables/", shown=lambda each: each.headline)
    return f"{lines}\n\n{counted(made)}. The pages have those that are no headlines."


def verdicts(table: Table, numbers: Numbers) -> Iterator[str]:
    """Yield a line for each statement: the difference in the paper, here, and the verdict."""
    for each in table.statements:
        pair = each.row, each.against, each.measure
        there = number(table.paper_gap(*pair)) or "no number"
        here = interval(table.gap(numbers, *pair), "+")
        unit = table.unit(each.measure)
        yield (
            f"{table.paper.title}, {table.paper.table}: {each.says} In the paper {there}, "
            f"here {here} {unit}: {table.verdict(numbers, each)}"
        )


def paper_lines(folder: Path) -> str:
    """Return a line for each headline of each recipe, with the recipe's lines of Python."""
    lines = [
        "| recipe | lines of Python | statement | verdict | minutes |",
        "| --- | --- | --- | --- | --- |",
    ]
    tables = tables_of()
    for readme in sorted(folder.glob("*/README.md")):
        recipe = readme.parent
        if not (recipe / "config").exists():
            continue
        title = readme.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        sources = [path.read_text(encoding="utf-8") for path in recipe.rglob("*.py")]
        size = sum(source.count("\n") for source in sources)
        shown = [["", "no table", ""]]
        for table in (table for table in tables if table.recipe == recipe.name):
            numbers = table.numbers()
            for each in (each for each in table.statements if each.headline):
                outcome = ["not run", ""]
                if numbers is not None:
                    outcome = [table.verdict(numbers, each), minutes(numbers)]
                shown.append([each.says, *outcome])
        for cells in shown[1:] or shown:
            lines.append(f"| [{title}]({recipe.name}/README.md) | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(table: Table) -> str:
    """Return a table with its verdicts and minutes in one line."""
    outcome = ["not run" if table.lab else "no miniature"]
    if numbers := table.numbers():
        counts = counts_by_verdict([(table, numbers)])
        outcome = [*(f"{n} {name}" for name, n in counts.items()), f"{minutes(numbers)} minutes"]
    return f"{table.name}: {table.paper.title}, {table.paper.table}: {', '.join(outcome)}"


def made() -> list[Made]:
    """Return the tables whose miniature has run, with its numbers."""
    return [(table, numbers) for table in tables_of() if (numbers := table.numbers())]


def generated() -> Iterator[tuple[Path, str]]:
    """Yield every generated file with its text: pages, pictures, READMEs with their lines."""
    tables = made()
    for table, numbers in tables:
        yield PAGES / f"{table.id}.md", render(table, numbers)
        yield PAGES / f"{table.id}.svg", forest(table, numbers)
    yield PAGES.parent / "statements.svg", statements_picture(tables)
    yield with_lines(PAGES.parent / "README.md", headline_lines(tables))
    few = statement_lines(tables, "results/tables/", shown=lambda each: each.in_readme)
    yield with_lines(ROOT / "README.md", few)
    yield with_lines(ROOT / "recipes" / "README.md", paper_lines(ROOT / "recipes"))
    for recipe in {table.recipe for table, _ in tables}:
        lines = statement_lines(
            [m for m in tables if m[0].recipe == recipe], "../../results/tables/"
        )
        yield with_lines(ROOT / "recipes" / recipe / "README.md", lines)


def with_lines(readme: Path, lines: str) -> tuple[Path, str]:
    return readme, with_block(readme.read_text(encoding="utf-8"), BLOCK, lines)


def is_same(committed: str, text: str) -> bool:
    """Return whether two texts of a file differ in a recipe's lines of Python at most.

    Those change with every edit of a recipe, which need not write its pages again.
    """
    return SIZES.sub("", committed) == SIZES.sub("", text)


def update() -> None:
    """Write the generated files."""
    for path, text in generated():
        write_atomic(path, text)


if __name__ == "__main__":
    argparse.ArgumentParser("python -m results.tables.page", description=__doc__).parse_args()
    update()
