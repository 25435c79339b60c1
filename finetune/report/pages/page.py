"""The frame of a page: one file with its style, its charts and the library that draws them.

Charts are Vega-Lite 6 (BSD-3-Clause), drawn as SVG, so that text can be selected and each chart has
a label for screen readers. `assets` holds the library as published, 0.8 MB; its expressions are
interpreted, so the page needs no `eval`. Nothing is loaded: the page's policy forbids it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.min.js", "draw.js")
STYLE = "page.css"
# Okabe and Ito's colours, which colour-blind people tell apart; without the yellow, too light here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7A7A7A")
# Charts are drawn again when the page's colours change.
_DRAW = """
const draw = () => drawCharts(CHARTS, COLOURS);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart of a page.

    Attributes:
        name: Its id on the page.
        title: Its heading.
        summary: What it shows, for those who cannot see it.
        spec: Vega-Lite's, without its schema and colours.
        note: What a reader should know about it.
    """

    name: str
    title: str
    summary: str
    spec: Mapping[str, Any]
    note: str = ""

    @property
    def complete_spec(self) -> dict[str, Any]:
        """What the library draws, as wide as its place."""
        return {"description": self.summary, "width": "container", **self.spec}

    @property
    def html(self) -> str:
        """The place of the chart."""
        note = f"<figcaption>{escape(self.note)}</figcaption>" if self.note else ""
        return (
            f"<figure><h2>{escape(self.title)}</h2>"
            f'<div class="chart" id="{self.name}"></div>{note}</figure>'
        )


def page(title: str, body: str, charts: Sequence[Chart] = ()) -> str:
    """Return a page.

    Args:
        title: Its heading, as plain text.
        body: Its content as HTML, with the place of each chart.
        charts: What is drawn there.
    """
    scripts = ""
    if charts:
        specs = {chart.name: chart.complete_spec for chart in charts}
        data = f"const COLOURS = {_script(COLOURS)}, CHARTS = {_script(specs)};{_DRAW}"
        every = [*map(asset, LIBRARIES), data]
        scripts = "".join(f"<script>{script}</script>\n" for script in every)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{asset(STYLE)}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
{scripts}</body>
</html>
"""


def table(name: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the columns after the first are figures where they are numbers.

    Where it is wider than the screen it is scrolled, by keys too.

    Args:
        name: What it is, for those who cannot see it.
        heads: Of its columns.
        rows: Their cells.
    """
    listed = [list(row) for row in rows]
    head = "".join(
        f'<th scope="col"{_figure(listed[0][i] if listed else "")}>{escape(name)}</th>'
        for i, name in enumerate(heads)
    )
    lines = "".join(
        "<tr>" + "".join(f"<td{_figure(cell)}>{_shown(cell)}</td>" for cell in row) + "</tr>\n"
        for row in listed
    )
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{escape(name)}"><table>\n'
        f"<tr>{head}</tr>\n{lines}</table></div>"
    )


def _figure(cell: object) -> str:
    return ' class="figure"' if isinstance(cell, int | float) or cell is None else ""


def _shown(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else escape(str(cell))


def asset(name: str) -> str:
    """Return a style sheet or script of pages."""
    return (resources.files("finetune.report.pages") / "assets" / name).read_text("utf-8")


def _script(value: object) -> str:
    """Return a value as JSON that cannot end a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
