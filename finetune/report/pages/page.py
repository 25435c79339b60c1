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

LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.min.js")
# Okabe and Ito's colours, which colour-blind people tell apart; without the yellow, too light here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7A7A7A")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #59636e;
  --line: #d1d9e0; --good: #0a5c2b; --bad: #a40e26; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1;
  --line: #3d444d; --good: #9be9b4; --bad: #ffa198; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p.soft, figcaption, summary { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td.figure { overflow-wrap: normal; white-space: nowrap; }
td.figure, th.figure { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: var(--good); } .bad { color: var(--bad); }
figure { margin: 1rem 0; }
.chart { width: 100%; min-height: 12rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 0 2rem; }
.pair > * { min-width: 0; }
pre { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 6px; padding: .8rem; }
"""

# A chart takes the colours of the page, and is drawn again when these change.
_DRAW = """
const dark = matchMedia("(prefers-color-scheme: dark)");
async function draw() {
  const ink = getComputedStyle(document.documentElement);
  const of = (name) => ink.getPropertyValue(name).trim();
  const words = { labelColor: of("--ink"), titleColor: of("--ink") };
  const config = {
    background: null, view: { stroke: null }, range: { category: COLOURS },
    axis: { ...words, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal",
            gridColor: of("--line"), domainColor: of("--line"), tickColor: of("--line") },
    legend: { ...words, labelFontSize: 12 }, header: words,
    text: { color: of("--ink") }, rule: { color: of("--ink") },
  };
  for (const [id, spec] of Object.entries(CHARTS)) {
    const element = document.getElementById(id);
    element.replaceChildren();
    const compiled = vegaLite.compile({ ...spec, config }).spec;
    const view = new vega.View(vega.parse(compiled, null, { ast: true }), {
      expr: vegaInterpreter.expressionInterpreter, renderer: "svg", container: element, hover: true,
    });
    await view.runAsync();
  }
  document.documentElement.dataset.drawn = "yes";
}
dark.addEventListener("change", draw);
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
        specs = {
            chart.name: {"description": chart.summary, "width": "container", **chart.spec}
            for chart in charts
        }
        data = f"const COLOURS = {_script(COLOURS)}, CHARTS = {_script(specs)};"
        every = [*map(_library, LIBRARIES), data + _DRAW]
        scripts = "".join(f"<script>{script}</script>\n" for script in every)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
{scripts}</body>
</html>
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the columns after the first are figures where they are numbers."""
    listed = [list(row) for row in rows]
    head = "".join(
        f'<th scope="col"{_figure(listed[0][i] if listed else "")}>{escape(name)}</th>'
        for i, name in enumerate(heads)
    )
    lines = "".join(
        "<tr>" + "".join(f"<td{_figure(cell)}>{_shown(cell)}</td>" for cell in row) + "</tr>\n"
        for row in listed
    )
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{lines}</table></div>'


def _figure(cell: object) -> str:
    return ' class="figure"' if isinstance(cell, int | float) or cell is None else ""


def _shown(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else escape(str(cell))


def _library(name: str) -> str:
    return (resources.files("finetune.report.pages") / "assets" / name).read_text("utf-8")


def _script(value: object) -> str:
    """Return a value as JSON that cannot end a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
