"""How a report is drawn: one list of blocks, rendered as Markdown and as a web page with its curves
as inline SVG.

The web page is ``page.html.jinja`` beside this file. What a report contains is decided in
:mod:`run_report`.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from core.tracking.loggers import progress

COLOURS = ("#2563a8", "#c2571a", "#2e8540", "#7b4ea3", "#a8325e", "#6b6f76", "#0f8b8d", "#a67c00")
# No channel is above 175: a dark page brightens every colour by 1.45
PHASE_COLOURS = (
    *("#4372a8", "#af5f14", "#3f8a38", "#8f5a8c", "#6b4632", "#a88a1a", "#2b9a96", "#24406b"),
    *("#a83c3f", "#af7a80", "#3b3f46", "#9a9a9a"),
)
DASHES = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))


# --- blocks ---


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Cells are text. ``prose`` columns wrap and keep their line breaks, the others stay on one
    line.

    On a narrow screen each row is a block of lines, so that nothing scrolls sideways; prose keeps
    its columns.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False
    caption: str = ""


@dataclass(frozen=True)
class Line:
    """One curve. ``low`` and ``high`` draw intervals; ``variant`` picks the dash, ``faint`` is for
    single seeds."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    group: int = 0
    variant: int = 0
    faint: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Curves:
    title: str
    lines: Sequence[Line]
    stacked: bool = False
    note: str = ""


@dataclass(frozen=True)
class Gallery:
    curves: Sequence[Curves]


@dataclass(frozen=True)
class Link:
    """A line that leads to another file beside the page."""

    text: str
    file: str


@dataclass(frozen=True)
class Fold:
    """Blocks that stay closed until the reader opens them."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Text | Table | Gallery | Link | Fold


def without_constants(table: Table) -> Table:
    """Return the table with columns that are alike in all of its rows moved into the caption.

    Of a table of one row only the empty columns go.
    """
    columns = enumerate(zip(*table.rows, strict=True))
    alike = [
        at
        for at, cells in columns
        if at and len(set(cells)) == 1 and (len(cells) > 1 or not cells[0])
    ]
    said = [f"{table.header[at]} {table.rows[0][at]}" for at in alike if table.rows[0][at]]
    caption = " ".join(
        part for part in (table.caption, f"In all rows: {', '.join(said)}." if said else "") if part
    )

    def kept(cells: Sequence[str]) -> list[str]:
        return [cell for at, cell in enumerate(cells) if at not in alike]

    return replace(
        table,
        header=kept(table.header),
        rows=[kept(cells) for cells in table.rows],
        caption=caption,
    )


# --- curves ---


def draw(
    panel: Curves, index: int, ground: str = "none", wide: bool = False
) -> tuple[str, dict[str, Any]]:
    """Return the panel as an ``<svg>`` element, its text as text, and what a pointer over it shows.

    ``index`` keeps ids apart on one page; without a ``ground`` the page's own colour is behind it.
    The second value has where the axes are in the picture (shares of its width and height), their
    limits, and the strong curves: label, colour, places and values.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style(index, ground)):
        labels = {line.label for line in panel.lines if line.label}
        columns = (
            1
            if max(map(len, labels), default=0) > 24
            else 2
            if max(map(len, labels), default=0) > 14
            else 3
        )
        # Rows of a legend that would take the curves' room
        beyond = max(0, math.ceil(len(labels) / columns) - 2)
        figure = Figure(figsize=(9.4 if wide else 4.4, 2.5 + 0.17 * beyond), layout="constrained")
        axes = figure.add_subplot()
        (_draw_stack if panel.stacked else _draw_lines)(axes, panel.lines)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e6ea", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(labels) > 1:
            figure.legend(
                loc="outside upper left", frameon=False, fontsize=8, ncols=columns, handlelength=1.5
            )
        svg = _svg(figure, panel.title)
        box = axes.get_position()
        limits = [*axes.get_xlim(), *axes.get_ylim()]
    return svg, {
        "box": [box.x0, box.x1, 1 - box.y1, 1 - box.y0],
        "limits": limits,
        "lines": _told(panel),
    }


def _style(index: int, ground: str) -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "text.parse_math": False,  # a run may be named a$b
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-9, 9),  # 0.00001 on the axis itself, not 1e-5 above it
        "svg.hashsalt": f"panel{index}",
        "font.family": "sans-serif",
        "font.size": 9,
        "figure.facecolor": ground,
        "axes.facecolor": ground,
        "axes.edgecolor": "#8a8f98",
        "axes.labelcolor": "#4a4f57",
        "xtick.color": "#4a4f57",
        "ytick.color": "#4a4f57",
    }


def _svg(figure: Any, title: str) -> str:
    """Return a figure as an ``<svg>`` element that takes the size of its place and says its
    title."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(
        r' id="(figure|axes|patch|line2d|text|legend|matplotlib|xtick|ytick|\w+Collection)[\w.]*"',
        "",
        svg,
    )
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?) width="[^"]*"', r"<svg \1\2", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _told(panel: Curves) -> list[list[Any]]:
    """Return label, colour, places and values of the curves that a pointer tells the values of, in
    four digits."""
    colours = PHASE_COLOURS if panel.stacked else COLOURS
    found = []
    for line in panel.lines:
        if not line.faint:
            colour = colours[line.group % len(colours)]
            digits = [
                [float(f"{value:.4g}") for value in values] for values in (line.steps, line.values)
            ]
            found.append([line.label, colour, *digits])
    return found


def _draw_lines(axes, lines: Sequence[Line]) -> None:
    seen = set()
    for line in lines:
        colour = COLOURS[line.group % len(COLOURS)]
        label = None if line.label in seen else line.label
        seen.add(line.label)
        dots = line.low is not None or len(line.steps) == 1  # measured at a few steps only
        look = {"linewidth": 0.8 if line.faint else 1.6, "alpha": 0.45 if line.faint else 1.0}
        look |= {
            "linestyle": DASHES[line.variant % len(DASHES)],
            "marker": "o" if dots else "",
            "markersize": 3,
        }
        axes.plot(line.steps, line.values, label=label, color=colour, **look)
        if line.low is not None and line.high is not None:
            axes.fill_between(
                line.steps, line.low, line.high, color=colour, alpha=0.15, linewidth=0
            )


def _draw_stack(axes, lines: Sequence[Line]) -> None:
    steps = lines[0].steps
    colours = [PHASE_COLOURS[line.group % len(PHASE_COLOURS)] for line in lines]
    labels = [line.label for line in lines]
    axes.stackplot(
        steps,
        [line.values for line in lines],
        labels=labels,
        colors=colours,
        linewidth=0,
        step="mid",
    )
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


def sparkline(values: Sequence[float]) -> str:
    """Return a curve in at most 24 characters, from its own minimum to its own maximum."""
    if len(values) > 24:
        values = [values[round(i * (len(values) - 1) / 23)] for i in range(24)]
    low, span = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    return "".join(
        "▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span)) if span else 3] for value in values
    )


# --- Markdown ---


BREAKS = {ord("\n"): "<br>", ord("\r"): "<br>"}


def inert(text: str) -> str:
    """Return text as Markdown in which no HTML acts and no picture is loaded, whoever wrote it."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", str(text)).replace("![", "!\\[")


def markdown_cell(text: str) -> str:
    cell = inert(text).replace("\\", "\\\\").replace("|", "\\|")
    return cell.replace("\r\n", "\n").translate(BREAKS)


def markdown_table(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join("| " + " | ".join(map(markdown_cell, line)) + " |" for line in lines)


def marks(name: str) -> tuple[str, str]:
    """Return the comments between which a README has a generated block."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def with_block(readme: str, name: str, block: str) -> str:
    """Return a README with a block between its marks; as it is where it has none."""
    begin, end = marks(name)
    head, _, rest = readme.partition(begin)
    return f"{head}{begin}\n{block}\n{end}{rest.partition(end)[2]}" if end in rest else readme


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """Return the page as Markdown; a curve becomes its first and last value and a sparkline."""
    return "\n\n".join([f"# {inert(title)}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + f" {inert(text)}"
        case Text(text, strong):
            text = inert(text)
            return "\n\n".join(f"**{line}**" for line in text.splitlines()) if strong else text
        case Table(header, rows, prose=True):  # a model's text, which must not act as markup
            return markdown_table(
                Table(header, [[escape(cell, quote=False) for cell in row] for row in rows])
            )
        case Table():
            return markdown_table(block) + (f"\n\n{inert(block.caption)}" if block.caption else "")
        case Gallery(curves):
            rows = [
                [
                    panel.title,
                    line.label,
                    f"{line.values[0]:.4g}",
                    f"{line.values[-1]:.4g}",
                    sparkline(line.values),
                ]
                for panel in curves
                for line in panel.lines
                if not line.faint
            ]
            return markdown_table(Table(["curve", "of", "first", "last", "shape"], rows))
        case Link(text, file):
            return f"[{inert(text)}]({inert(file)})"
        case Fold(title, inner):
            return "\n\n".join([f"### {inert(title)}", *map(_markdown, inner)])


# --- HTML ---


def html(title: str, blocks: Sequence[Block]) -> str:
    """Return the page: ``page.html.jinja`` beside this file, in which every text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = _prose
    number = itertools.count()
    galleries = [len(block.curves) for block in blocks if isinstance(block, Gallery)]
    # One alone is drawn for a wide screen and a narrow one
    panels = sum(count + (count == 1) for count in galleries)
    with progress("report", panels, "curve") as drawn:

        def curve(panel: Curves, wide: bool) -> dict[str, Any]:
            drawn()
            svg, told = draw(panel, next(number), wide=wide)
            return {"svg": Markup(svg), "told": json.dumps(told, separators=(",", ":"))}

        script = (
            Markup((Path(__file__).parent / "curves.js").read_text(encoding="utf-8"))
            if panels
            else ""
        )

        def pictures_of(curves: Sequence[Curves]) -> list[tuple[Curves, bool]]:
            return (
                [(curves[0], True), (curves[0], False)]
                if len(curves) == 1
                else [(one, False) for one in curves]
            )

        values = {
            "title": title,
            "blocks": blocks,
            "curve": curve,
            "script": script,
            "pictures_of": pictures_of,
        }
        return environment.get_template("page.html.jinja").render(values) + "\n"


def _prose(text: str) -> Markup:
    """Return a paragraph, or a list where every line begins with a dash; what stands between
    backticks is code."""
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    lines = shown.splitlines()
    if lines and all(line.startswith("- ") for line in lines):
        return Markup("<ul>" + "".join(f"<li>{line[2:]}</li>" for line in lines) + "</ul>")
    return Markup(f"<p>{shown}</p>")


# --- the files ---


def write_pages(folder: Path, name: str, title: str, blocks: Sequence[Block]) -> tuple[Path, Path]:
    """Write ``name.md`` and ``name.html`` into the folder and return their paths.

    Half a surrogate pair, which no file can hold, is written as an escape.
    """
    paths = folder / f"{name}.md", folder / f"{name}.html"
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, (markdown(title, blocks), html(title, blocks)), strict=True):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return paths
