"""Pages to look at: one HTML file each, with its style, its charts and the library that draws them.

Charts are Vega-Lite 6 (BSD-3-Clause), drawn as SVG, so that text can be selected and each chart has
a label for screen readers. `assets` holds the library as published, 0.8 MB; its expressions are
interpreted, so the page needs no `eval`. Nothing is loaded: the page's policy forbids it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from finetune.report.memory import MemoryRow
from finetune.report.rows import shown
from finetune.run.run_files import EVAL_LOSS
from offload.plan.machine.machine import GIB
from offload.plan.schedule.timeline import Timeline

if TYPE_CHECKING:
    from finetune.report.explain import Miss

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
    """A chart of a page."""

    name: str  # its id on the page
    title: str  # its heading
    summary: str  # what it shows, for those who cannot see it
    spec: Mapping[str, Any]  # Vega-Lite's, without its schema and colours
    note: str = ""  # what a reader should know about it

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
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';
 img-src data:">
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


def asset(name: str) -> str:
    """Return a style sheet or script of pages."""
    return (resources.files("finetune.report") / "assets" / name).read_text("utf-8")


def _script(value: object) -> str:
    """Return a value as JSON that cannot end a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


Row = Mapping[str, Any]
MOST_POINTS = 2000  # of a curve: more are no sharper on a page, and the file stays small
MOST_BEYOND = 4.0  # times the longest bar that a limit may be, or it is not drawn
MOST_BARS = 3000  # of a step's drawing
_ZOOM = [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}]
HEIGHT = 260
# Labels that were pushed inwards at the ends, or of each 40 px, touch on a phone.
_AXIS = {"tickCount": {"expr": "ceil(width / 80)"}, "labelFlush": False}
_STEPS = {"field": "step", "type": "quantitative", "axis": {**_AXIS, "tickMinStep": 1}}
_WHICH = ["predicted", "measured"]


# The charts of a run's metrics: what each is called, the metric, and the name of its values.
CURVES = {
    "eval": ("Held-out loss", EVAL_LOSS, "loss"),
    "loss": ("Training loss", "loss", "loss"),
    "reward": ("Mean reward", "reward", "reward"),
    "rate": ("Tokens per second", "tokens_per_s", "tokens/s"),
    "lr": ("Learning rate", "lr", "rate"),
    "energy": ("Joules per token", "energy_per_token_j", "J"),
}


def metric_charts(
    runs: Mapping[str, Sequence[Row]], names: Sequence[str] = tuple(CURVES)
) -> list[Chart]:
    """Return curves over the steps of runs, of each metric that one of them has.

    Args:
        runs: Rows of metrics by the run's name, which has one colour in all charts.
        names: Names of the charts.
    """
    found = []
    for name in names:
        title, key, y = CURVES[name]
        points = [
            {"run": run, "step": row["step"], y: row[key]}
            for run, rows in runs.items()
            for row in rows
            if key in row
        ]
        if points:
            found.append(
                curves(name, title, points, y=y, runs=list(runs), is_held_out=name == "eval")
            )
    return found


def curves(
    name: str,
    title: str,
    points: Sequence[Row],
    *,
    y: str,
    runs: Sequence[str] = (),
    is_held_out: bool = False,
) -> Chart:
    """Return curves over steps that can be zoomed.

    Args:
        name: The chart's id.
        title: Its heading.
        points: Each with `step`, the value, and `run` where there are several.
        y: Name of the value.
        runs: Names of all runs, in the order of their colours.
        is_held_out: Whether each value is marked, as there are few.
    """
    colour: dict[str, Any] = {}
    if runs[1:]:
        domain = {"scale": {"domain": list(runs)}, "legend": _legend(runs, labels_px=60)}
        colour = {"color": {"field": "run", "type": "nominal", "title": None, **domain}}
    last = points[-1]
    counts = Counter(point.get("run") for point in points)
    is_marked = is_held_out or 1 in counts.values()
    values, steps = ([point[name] for point in points] for name in (y, "step"))
    return Chart(
        name=name,
        title=title,
        summary=f"{title}: {shown(last[y])} in step {last['step']}"
        + (f" of {last['run']}, the last of {len(runs)} runs." if runs[1:] else "."),
        spec={
            "height": HEIGHT,
            "params": _ZOOM,
            "data": {"values": thinned(points, "run" if runs[1:] else None)},
            "mark": {"type": "line", "point": is_marked, "clip": True, "strokeWidth": 2},
            "encoding": {
                "x": _STEPS | {"scale": _scale(steps, is_padded=True) | {"nice": False}},
                "y": {
                    "field": y,
                    "type": "quantitative",
                    "scale": _scale(values, is_padded=is_marked),
                },
                "tooltip": [
                    *([{"field": "run", "type": "nominal"}] if runs[1:] else []),
                    {"field": "step", "type": "quantitative"},
                    {"field": y, "type": "quantitative", "format": ",.5~r"},
                ],
                **colour,
            },
        },
    )


def _legend(names: Iterable[str], *, labels_px: int) -> dict[str, Any]:
    """Return a legend above a chart, in as many columns as fit.

    Args:
        names: Names that the legend explains.
        labels_px: Width of the labels on the left.
    """
    columns = f"max(1, floor((containerSize()[0] - {labels_px}) / {40 + 7 * max(map(len, names))}))"
    return {"orient": "top", "columns": {"expr": columns}, "labelLimit": 300}


def _scale(values: Sequence[float], *, is_padded: bool) -> dict[str, Any]:
    """Return the scale of some values; where they are all equal it goes around them.

    Args:
        values: All that are drawn.
        is_padded: Whether a mark at the edge has room.
    """
    scale: dict[str, Any] = {"zero": False} | ({"padding": 8} if is_padded else {})
    low, high = min(values), max(values)
    if low < high:
        return scale
    around = 1 if low == int(low) else abs(low) / 2
    return scale | {"domain": [low - around, low + around]}


def step_times(rows: Sequence[Row], *, predicted_s: float) -> Chart:
    """Return the time of each step, and the predicted one as a line."""
    steps = [row["step"] for row in rows]
    points = [{"step": row["step"], "seconds": row["phases_s"]["step"]} for row in rows]
    most_s = max(predicted_s, *(point["seconds"] for point in points))
    scale = {"domain": [0, 1.05 * most_s]}  # no point is cut by the edge
    axis = {"field": "seconds", "type": "quantitative", "scale": scale}
    return Chart(
        name="times",
        title="Seconds per step",
        summary=f"Time of each step; {predicted_s:.3g} s were predicted before the first.",
        note=f"The line is what was predicted before step 1: {predicted_s:,.4g} s.",
        spec={
            "height": HEIGHT,
            "layer": [
                {
                    "params": _ZOOM,
                    "data": {"values": thinned(points)},
                    "mark": {"type": "point", "filled": True, "size": 40, "clip": True},
                    "encoding": {
                        "x": _STEPS | {"scale": _scale(steps, is_padded=True) | {"nice": False}},
                        "y": axis,
                        "tooltip": [{"field": "step"}, {"field": "seconds", "format": ".4~g"}],
                    },
                },
                {
                    "data": {"values": [{"seconds": predicted_s}]},
                    "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 2},
                    "encoding": {"y": {"field": "seconds", "type": "quantitative"}},
                },
            ],
        },
    )


def misses(found: "Sequence[Miss]", *, num: int = 8) -> Chart:
    """Return the parts of a step that took longest, predicted next to measured."""
    largest = sorted(found, key=lambda one: -max(one.predicted_s, one.measured_s))[:num]
    bars = [
        {"part": one.name, "which": which, "ms": seconds * 1e3}
        for one in largest
        for which, seconds in (("predicted", one.predicted_s), ("measured", one.measured_s))
    ]
    return _pairs("parts", "Where a step's time goes", bars, x="ms", y="part", unit="ms per step")


def memory(rows: Sequence[MemoryRow]) -> Chart:
    """Return memory by term, predicted next to measured, and the limit of each memory."""
    bars = [
        {"term": row.name, "which": which, "GiB": num_bytes / GIB}
        for row in rows
        for which, num_bytes in (("predicted", row.predicted), ("measured", row.measured))
        if num_bytes is not None
    ]
    chart = _pairs("memory", "Memory by term", bars, x="GiB", y="term", unit="GiB")
    limits = {row.name: row.limit / GIB for row in rows if row.limit is not None}
    if not limits:
        return chart
    shown = ", ".join(f"{term} {size:.4g} GiB" for term, size in limits.items())
    most = MOST_BEYOND * max(max(row.predicted or 0, row.measured or 0) for row in rows) / GIB
    near = [
        {"term": term, "which": "limit", "GiB": size}
        for term, size in limits.items()
        if size <= most
    ]
    if not near:  # a layer without a line would be a picture that no words describe
        return replace(chart, note=f"Limits: {shown}.")
    encoding = chart.spec["encoding"]
    lines = {
        "data": {"values": near},
        "mark": {"type": "tick", "thickness": 3, "bandSize": 28},
        "encoding": {axis: encoding[axis] for axis in ("y", "x", "tooltip")},
    }
    in_bars = {name: chart.spec[name] for name in ("data", "mark", "encoding")}
    return replace(
        chart,
        note=f"Limits: {shown}. One that is near is a line at the total.",
        spec={"height": chart.spec["height"], "layer": [in_bars, lines]},
    )


# A name of several parts in lines of two: its width is a part of a narrow screen's.
_WRAPPED = {
    "labelLimit": 150,
    "labelExpr": "split(replace(datum.label, regexp('([^,]*, [^,]*), ', 'g'), '$1,|'), '|')",
    "labelLineHeight": 10,
    "labelFontSize": 9,
}


def _pairs(name: str, title: str, bars: Sequence[Row], *, x: str, y: str, unit: str) -> Chart:
    """Return bars in pairs: predicted and measured."""
    order = list(dict.fromkeys(bar[y] for bar in bars))
    return Chart(
        name=name,
        title=title,
        summary=f"{title}: predicted and measured, in {unit}.",
        spec={
            "height": {"step": 14},
            "data": {"values": list(bars)},
            "mark": {"type": "bar"},
            "encoding": {
                "y": {"field": y, "sort": order, "title": None, "axis": _WRAPPED},
                "yOffset": {"field": "which", "type": "nominal", "sort": _WHICH},
                "x": {"field": x, "type": "quantitative", "title": unit, "axis": _AXIS},
                "color": {
                    "field": "which",
                    "type": "nominal",
                    "sort": _WHICH,
                    "title": None,
                    "legend": {"orient": "top"},
                },
                "tooltip": [{"field": y}, {"field": "which"}, {"field": x, "format": ".4~g"}],
            },
        },
    )


def gantt(timelines: Mapping[str, Timeline], which_steps: str) -> Chart:
    """Return the ops of steps on their lanes; one can zoom in until each op is seen.

    Args:
        timelines: One for each step, by the name of its lanes.
        which_steps: A sentence or two about these steps.
    """
    bars: list[dict[str, Any]] = []
    for which, timeline in timelines.items():
        num = len(timeline.spans)
        shortest = sorted(span.duration_s for span in timeline.spans)
        floor_s = shortest[num - MOST_BARS] if num > MOST_BARS else 0.0
        bars += [
            {
                "row": f"{which}: {span.lane.value}",
                "op": span.kind.value.replace("_", " "),
                "layer": span.layer,
                "micro-batch": span.micro_batch,
                "bytes": span.num_bytes,
                "start": span.start_s * 1e3,
                "end": span.end_s * 1e3,
                "ms": span.duration_s * 1e3,
            }
            for span in timeline.spans
            if span.duration_s > 0 and span.duration_s >= floor_s
        ]
    left_out = sum(len(one.spans) for one in timelines.values()) - len(bars)
    lanes = sorted({bar["row"] for bar in bars})
    rows = [row for which in timelines for row in lanes if row.startswith(f"{which}:")]
    return Chart(
        name="gantt",
        title="A step, op by op",
        summary="The ops of a step on their lanes, as predicted and as measured.",
        note=f"{which_steps} Drag to move, scroll to zoom; a bar names its op."
        + (f" The {left_out:,} shortest ops are left out." if left_out else ""),
        spec={
            "height": {"step": 26},
            "params": _ZOOM,
            "data": {"values": bars},
            "mark": {"type": "bar", "clip": True, "height": 18},
            "encoding": {
                "y": {"field": "row", "sort": rows, "title": None, "axis": {"labelLimit": 150}},
                "x": {"field": "start", "type": "quantitative", "title": "ms", "axis": _AXIS},
                "x2": {"field": "end"},
                "color": {
                    "field": "op",
                    "type": "nominal",
                    "title": None,
                    "legend": _legend([bar["op"] for bar in bars], labels_px=150),
                    "scale": {"scheme": "tableau20"},
                },
                "tooltip": [
                    {"field": "op"},
                    {"field": "layer"},
                    {"field": "micro-batch"},
                    {"field": "ms", "format": ".4~g"},
                    {"field": "bytes", "format": ","},
                ],
            },
        },
    )


def thinned(points: Sequence[Row], by: str | None = None) -> list[Row]:
    """Return at most MOST_POINTS of each curve, the first and the last among them."""
    curves: dict[Any, list[Row]] = {}
    for point in points:
        curves.setdefault(point[by] if by else None, []).append(point)
    kept: list[Row] = []
    for curve in curves.values():
        stride = -(-len(curve) // MOST_POINTS)
        kept += curve[:-1:stride] + curve[-1:]
    return kept
