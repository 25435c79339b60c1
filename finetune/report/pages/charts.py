"""The charts of pages, as Vega-Lite specifications."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from finetune.report.explain import Miss
from finetune.report.memory import MemoryRow
from finetune.report.pages.page import Chart
from offload.plan.machine.machine import GIB
from offload.plan.schedule.timeline import Timeline

Row = Mapping[str, Any]
MOST_POINTS = 2000  # of a curve: more are no sharper on a page, and the file stays small
MOST_BEYOND = 4.0  # times the longest bar that a limit may be, or it is not drawn
MOST_BARS = 3000  # of a step's drawing
_ZOOM = [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}]
_HEIGHT = 260
_WHICH = ["predicted", "measured"]


def curves(
    name: str,
    title: str,
    points: Sequence[Row],
    *,
    y: str,
    by: str | None = None,
    summary: str,
    has_points: bool = False,
    is_log: bool = False,
) -> Chart:
    """Return curves over steps that can be zoomed.

    Args:
        name: The chart's id.
        title: Its heading.
        points: Each with `step`, the value, and what tells curves apart.
        y: Name of the value.
        by: What tells curves apart; None for one curve.
        summary: What it shows, in words.
        has_points: Whether each value is marked, as where there are few.
        is_log: Whether the values' scale is logarithmic.
    """
    colour: dict[str, Any] = {}
    if by is not None:
        colour = {"color": {"field": by, "type": "nominal", "legend": {"orient": "top"}}}
        colour["color"]["title"] = None
    shown = [{"field": key, "type": "nominal"} for key in ([by] if by else [])]
    scale = {"type": "log"} if is_log else {"zero": False}
    return Chart(
        name=name,
        title=title,
        summary=summary,
        spec={
            "height": _HEIGHT,
            "params": _ZOOM,
            "data": {"values": thinned(points, by)},
            "mark": {"type": "line", "point": has_points, "clip": True, "strokeWidth": 1.5},
            "encoding": {
                "x": {"field": "step", "type": "quantitative", "axis": {"tickMinStep": 1}},
                "y": {"field": y, "type": "quantitative", "scale": scale},
                "tooltip": [
                    *shown,
                    {"field": "step", "type": "quantitative"},
                    {"field": y, "type": "quantitative", "format": ".5~g"},
                ],
                **colour,
            },
        },
    )


def same_colours(drawn: Sequence[Chart], names: Sequence[str]) -> list[Chart]:
    """Return charts of curves in which each name has one colour, also where another is absent."""
    found = []
    for chart in drawn:
        encoding = chart.spec["encoding"]
        colour = encoding["color"] | {"scale": {"domain": list(names)}}
        spec = {**chart.spec, "encoding": encoding | {"color": colour}}
        found.append(replace(chart, spec=spec))
    return found


def step_times(rows: Sequence[Row], *, predicted_s: float) -> Chart:
    """Return the time of each step, and the predicted one as a line."""
    points = [{"step": row["step"], "seconds": row["phases_s"]["step"]} for row in rows]
    axis = {"field": "seconds", "type": "quantitative", "scale": {"zero": True}}
    return Chart(
        name="times",
        title="Seconds per step",
        summary=f"Time of each step; {predicted_s:.3g} s were predicted before the first.",
        note=f"The line is what was predicted before step 1: {predicted_s:,.4g} s.",
        spec={
            "height": _HEIGHT,
            "layer": [
                {
                    "params": _ZOOM,
                    "data": {"values": thinned(points)},
                    "mark": {"type": "point", "filled": True, "size": 18, "clip": True},
                    "encoding": {
                        "x": {"field": "step", "type": "quantitative", "axis": {"tickMinStep": 1}},
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


def break_even(points: Sequence[Row], *, break_even_tokens: int | None) -> Chart:
    """Return tokens/s over tokens per step, and from where streaming is free.

    Args:
        points: Each with `tokens per step` and `tokens/s`.
        break_even_tokens: Tokens per step from which streaming is free: 0 where nothing is
            streamed; None where it is more than any step should have.
    """
    # short labels: on a phone the last one would overlap the one before, and be dropped
    in_k = {"labelExpr": "format(datum.value / 1024, ',') + 'k'"}
    x: dict[str, Any] = {
        "field": "tokens per step",
        "type": "quantitative",
        "title": "tokens per step (k: 1,024)",
    }
    x |= {"axis": in_k, "scale": {"type": "log", "base": 2, "nice": False}}
    y = {"field": "tokens/s", "type": "quantitative", "scale": {"zero": True}}
    shown = [{"field": "tokens per step", "format": ","}, {"field": "tokens/s", "format": ",.0f"}]
    layers: list[dict[str, Any]] = [
        {
            "data": {"name": "points", "values": list(points)},
            "mark": {"type": "line", "point": {"filled": True, "size": 40}, "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "tooltip": shown},
        }
    ]
    line = ""
    if break_even_tokens == 0:
        line = "The whole model is on the device: nothing is streamed."
    elif break_even_tokens is not None:
        line = f"The line is the break-even: {break_even_tokens:,} tokens."
        layers.append(
            {
                "data": {"values": [{"tokens per step": break_even_tokens}]},
                "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 2},
                "encoding": {"x": x},
            }
        )
    return Chart(
        name="curve",
        title="Tokens per second over tokens per step",
        summary=f"Predicted tokens per second for steps of more and fewer tokens. {line}",
        note=line,
        spec={"height": _HEIGHT, "layer": layers},
    )


def misses(found: Sequence[Miss], *, num: int = 8) -> Chart:
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
                "x": {"field": x, "type": "quantitative", "title": unit},
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


def gantt(timelines: Mapping[str, Timeline]) -> Chart:
    """Return the ops of steps on their lanes; one can zoom in until each op is seen."""
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
    rows = list(dict.fromkeys(bar["row"] for bar in bars))
    return Chart(
        name="gantt",
        title="A step, op by op",
        summary="The ops of a step on their lanes, as predicted and as measured.",
        note="Drag to move, scroll to zoom; a bar names its op."
        + (f" The {left_out:,} shortest ops are left out." if left_out else ""),
        spec={
            "height": {"step": 26},
            "params": _ZOOM,
            "data": {"values": bars},
            "mark": {"type": "bar", "clip": True, "height": 18},
            "encoding": {
                "y": {"field": "row", "sort": rows, "title": None, "axis": {"labelLimit": 150}},
                "x": {"field": "start", "type": "quantitative", "title": "ms"},
                "x2": {"field": "end"},
                "color": {
                    "field": "op",
                    "type": "nominal",
                    "title": None,
                    "legend": {"orient": "top", "columns": 4},
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
