"""How a report is drawn: curves as inline SVG, and one list of blocks rendered as Markdown and as a web page.

The page is one file: no script, no font, no image is loaded from anywhere.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563a8", "#c2571a", "#2e8540", "#7b4ea3", "#a8325e", "#6b6f76")
PHASE_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#9c755f", "#edc948", "#76b7b2", "#bab0ac", "#e15759")
DASHES = ("-", (0, (4, 2)), (0, (1, 1.4)))


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
    """Cells are text. ``prose`` columns wrap and keep their line breaks, the others stay on one line."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False


@dataclass(frozen=True)
class Line:
    """One curve. ``low`` and ``high`` draw intervals; ``variant`` picks the dash, ``faint`` is for single seeds."""

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
class Fold:
    """Blocks that stay closed until they are asked for."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Text | Table | Gallery | Fold


# --- curves ---


def draw(panel: Curves, index: int) -> str:
    """The panel as an ``<svg>`` element, its text as text. ``index`` keeps ids apart on one page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"panel{index}",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.edgecolor": "#8a8f98",
        "axes.labelcolor": "#4a4f57",
        "xtick.color": "#4a4f57",
        "ytick.color": "#4a4f57",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        axes = figure.add_subplot()
        (_draw_stack if panel.stacked else _draw_lines)(axes, panel.lines)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e6ea", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(labels := {line.label for line in panel.lines if line.label}) > 1:
            columns = 1 if max(map(len, labels)) > 24 else 2 if max(map(len, labels)) > 14 else 3
            figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=columns, handlelength=1.5)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="(figure|axes|patch|line2d|text|legend|matplotlib|xtick|ytick|\w+Collection)[\w.]*"', "", svg)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?) width="[^"]*"', r"<svg \1\2", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(panel.title)}" ', 1)


def _draw_lines(axes, lines: Sequence[Line]) -> None:
    seen = set()
    for line in lines:
        colour = COLOURS[line.group % len(COLOURS)]
        label = None if line.label in seen else line.label
        seen.add(line.label)
        dots = line.low is not None or len(line.steps) == 1  # measured at a few steps only
        look = {"linewidth": 0.8 if line.faint else 1.6, "alpha": 0.45 if line.faint else 1.0}
        look |= {"linestyle": DASHES[line.variant % len(DASHES)], "marker": "o" if dots else "", "markersize": 3}
        axes.plot(line.steps, line.values, label=label, color=colour, **look)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.steps, line.low, line.high, color=colour, alpha=0.15, linewidth=0)


def _draw_stack(axes, lines: Sequence[Line]) -> None:
    steps = lines[0].steps
    colours = [PHASE_COLOURS[i % len(PHASE_COLOURS)] for i in range(len(lines))]
    labels = [line.label for line in lines]
    axes.stackplot(steps, [line.values for line in lines], labels=labels, colors=colours, linewidth=0, step="mid")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


def sparkline(values: Sequence[float]) -> str:
    """A curve in at most 24 characters, from its own minimum to its own maximum."""
    if len(values) > 24:
        values = [values[round(i * (len(values) - 1) / 23)] for i in range(24)]
    low, span = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span)) if span else 3] for value in values)


# --- Markdown ---


def markdown_cell(text: str) -> str:
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def markdown_table(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join("| " + " | ".join(map(markdown_cell, line)) + " |" for line in lines)


def markdown(title: str, blocks: Sequence[Block]) -> str:
    return "\n\n".join([f"# {title}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + f" {text}"
        case Text(text, strong):
            return "\n\n".join(f"**{line}**" for line in text.splitlines()) if strong else text
        case Table(header, rows, prose=True):  # a model's text, which must not act as markup
            return markdown_table(Table(header, [[escape(cell, quote=False) for cell in row] for row in rows]))
        case Table():
            return markdown_table(block)
        case Gallery(curves):
            rows = [
                [panel.title, line.label, f"{line.values[0]:.4g}", f"{line.values[-1]:.4g}", sparkline(line.values)]
                for panel in curves
                for line in panel.lines
                if not line.faint
            ]
            return markdown_table(Table(["curve", "of", "first", "last", "shape"], rows))
        case Fold(title, inner):
            return "\n\n".join([f"### {title}", *map(_markdown, inner)])


# --- HTML ---

_CSS = """
:root { color-scheme: light; --ink: #1d2127; --soft: #5b616b; --rule: #e1e4e8; --wash: #f6f7f9; --mark: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 60px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 18px; margin: 38px 0 10px; padding-top: 14px; border-top: 1px solid var(--rule); }
h3 { font-size: 15px; margin: 22px 0 8px; }
p { margin: 6px 0 10px; max-width: 110ch; }
p.strong { font-size: 18px; line-height: 1.45; max-width: none; white-space: pre-line; padding: 14px 18px;
  background: var(--wash);
  border-left: 4px solid var(--mark); border-radius: 0 6px 6px 0; }
.scroll { overflow-x: auto; margin: 8px 0 14px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--rule); }
th, td { text-align: left; vertical-align: bottom; padding: 5px 12px 5px 0; }
td { vertical-align: top; white-space: nowrap; border-bottom: 1px solid var(--rule); }
td.words { white-space: normal; min-width: 110px; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 240px; }
table.prose td { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 90px; }
table.prose td { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 12px; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 14px; }
.gallery > figure:only-child { grid-column: 1 / -1; max-width: 760px; }
ul { margin: 6px 0 10px; padding-left: 20px; max-width: 110ch; }
code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 0.88em; }
figure { margin: 0; padding: 10px 12px 8px; border: 1px solid var(--rule); border-radius: 8px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 4px; }
figcaption span { font-weight: 400; color: var(--soft); font-size: 12px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif !important; }
details { margin: 14px 0; } summary { cursor: pointer; color: var(--mark); font-weight: 600; font-size: 14px; }
"""


def html(title: str, blocks: Sequence[Block]) -> str:
    counter = iter(range(10_000))
    body = "\n".join(_html(block, counter) for block in blocks)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}\n<title>{escape(title)}</title>\n<style>{_CSS}</style>\n'
        f"</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _td(cell: str) -> str:
    wrap = ' class="long"' if len(cell) > 60 else ' class="words"' if len(cell) > 24 and " " in cell else ""
    return f"<td{wrap}>{escape(cell)}</td>"


def _prose(text: str) -> str:
    """A paragraph, or a list where every line begins with a dash; what stands between backticks is code."""
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    lines = shown.splitlines()
    if lines and all(line.startswith("- ") for line in lines):
        return "<ul>" + "".join(f"<li>{line[2:]}</li>" for line in lines) + "</ul>"
    return f"<p>{shown}</p>"


def _html(block: Block, counter) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text, strong):
            return f'<p class="strong">{escape(text)}</p>' if strong else _prose(text)
        case Table(header, rows, prose):
            top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
            body = "\n".join("<tr>" + "".join(map(_td, row)) + "</tr>" for row in rows)
            kind = ' class="prose"' if prose else ""
            return f'<div class="scroll"><table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
        case Gallery(curves):
            return '<div class="gallery">' + "\n".join(_figure(panel, next(counter)) for panel in curves) + "</div>"
        case Fold(title, inner):
            body = "\n".join(_html(each, counter) for each in inner)
            return f"<details><summary>{escape(title)}</summary>\n{body}\n</details>"


def _figure(panel: Curves, index: int) -> str:
    note = f" <span>{escape(panel.note)}</span>" if panel.note else ""
    return f"<figure><figcaption>{escape(panel.title)}{note}</figcaption>{draw(panel, index)}</figure>"
