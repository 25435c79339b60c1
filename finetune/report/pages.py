"""Pages to look at: one HTML file each, with its style, its charts and the library that draws them.

Charts are Vega-Lite 6 (BSD-3-Clause), drawn as SVG, so that text can be selected and each chart has
a label for screen readers. `assets` holds the library as published, 0.8 MB; its expressions are
interpreted, so the page needs no `eval`. Nothing is loaded: the page's policy forbids it.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.recipe.recipe import Recipe
from finetune.report.explain import (
    METRICS,
    Explanation,
    Miss,
    explain,
    features_took,
    probe_learned,
    probe_took,
)
from finetune.report.format import shown_time
from finetune.report.memory import MemoryRow
from finetune.run.run_dir import RunDir
from finetune.run.run_files import EVAL_LOSS, SAMPLES, read_rows, read_sealed
from offload.plan.machine.machine import GIB
from offload.plan.schedule.timeline import Timeline

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
    return (resources.files("finetune.report") / "assets" / name).read_text("utf-8")


def _script(value: object) -> str:
    """Return a value as JSON that cannot end a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


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


REPORT_PAGE = "report.html"
NUM_SAMPLES = 5
_TRAINED = {"adapter": "an adapter", "head": "a new head alone, on features of the frozen layers"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a model answers to a held-out row.

    Attributes:
        prompt: Of the row.
        wanted: The row's own answer.
        before: The model's before training; None if it was not asked.
        after: The same after training.
    """

    prompt: str
    wanted: str
    before: str | None
    after: str | None


def write_run_page(run_dir: Path, *, goes_on: bool = False) -> Path:
    """Write report.html from the files of a run, finished or not, and return it.

    Args:
        run_dir: Of the run.
        goes_on: Whether the run is in progress, which the page then says.

    Raises:
        CheckpointError: There is no run, or a file is damaged.
    """
    file = run_dir / REPORT_PAGE
    write_atomically(file, run_page(run_dir, goes_on=goes_on))
    return file


def run_page(run_dir: Path, *, goes_on: bool = False) -> str:
    """Return the page of a run; one that did no step shows what there is.

    Raises:
        CheckpointError: There is no run, or a file is damaged.
    """
    if not RunDir(run_dir).recipe_file.exists():
        raise CheckpointError(
            f"{run_dir} holds no run",
            limit="a run's directory has its recipe.yaml",
            hint="give the directory that `sluice finetune` wrote",
        )
    recipe, rows = RunDir(run_dir).recipe(), read_rows(run_dir / METRICS)
    explanation = explain(run_dir) if rows else None
    drawn = _charts(rows, explanation) if explanation is not None else {}
    notes = (f"<p>{escape(note)}</p>" for note in _notes(rows, run_dir, goes_on=goes_on))
    parts = [*notes, _facts(recipe, rows, explanation)]
    for pair in (("loss", "eval"), ("lr", "rate"), ("times", "parts"), ("memory",), ("gantt",)):
        found = "".join(drawn[name].html for name in pair if name in drawn)
        parts.append(f'<div class="pair">{found}</div>' if len(pair) > 1 else found)
    if explanation is not None:
        parts += [_comparison(explanation), _memory(explanation)]
    parts += [_samples(run_dir), _recipe(run_dir, explanation)]
    return page(f"Run {recipe.output.run_dir.name}", "\n".join(parts), list(drawn.values()))


def _notes(rows: Sequence[Row], run_dir: Path, *, goes_on: bool) -> list[str]:
    if not rows:
        return ["The run has done no step yet."]
    if not goes_on:
        return []
    return [
        f"Written after step {rows[-1]['step']:,}, when the run went on; `sluice explain"
        f" {run_dir} --html` writes this page again."
    ]


def _facts(recipe: Recipe, rows: Sequence[Row], explanation: Explanation | None) -> str:
    found: list[tuple[str, str]] = [
        ("model", str(recipe.model.path)),
        ("trains", _TRAINED.get(str(recipe.train.what), "weights of the model")),
        ("learns by", recipe.objective.method),
        ("data", ", ".join(source.path for source in recipe.data.sources)),
    ]
    if rows:
        tokens = sum(row["num_tokens"] for row in rows)
        found += [
            ("loss", f"{rows[0]['loss']:.4f} at first, {rows[-1]['loss']:.4f} at last"),
            ("tokens", f"{tokens:,} in {len(rows):,} steps"),
        ]
    evaluated = [row for row in rows if EVAL_LOSS in row]
    if evaluated:
        best = min(evaluated, key=lambda row: float(row[EVAL_LOSS]))
        found.append(("best held-out loss", f"{best[EVAL_LOSS]:.4f} after step {best['step']}"))
    if explanation is not None:
        section, probe = explanation.sections[-1], explanation.probe
        if explanation.features is not None:
            found.append(("features", features_took(explanation.features)))
        if probe is not None:
            found += [("probe", probe_took(probe)), ("head of the probe", probe_learned(probe))]
        found += [
            ("steps", f"{explanation.num_done:,} of {explanation.num_steps:,} done"),
            ("machine", section.machine),
            (
                "a step",
                f"{shown_time(section.predicted_s)} predicted ({section.grade}),"
                f" {shown_time(section.wall_s)} measured",
            ),
        ]
        found += [("energy", line) for line in explanation.energy.lines(recipe.report)]
        if explanation.versions:
            versions = (f"{name} {version}" for name, version in explanation.versions.items())
            found.append(("versions", ", ".join(versions)))
        for change in explanation.changes:
            found.append(("changed since", change))
    return table("The run", ("", ""), found)


def _charts(rows: Sequence[Row], explanation: Explanation) -> dict[str, Chart]:
    first, last = rows[0], rows[-1]
    evaluated = [{"step": row["step"], "loss": row[EVAL_LOSS]} for row in rows if EVAL_LOSS in row]
    found = [
        curves(
            "loss",
            "Training loss",
            [{"step": row["step"], "loss": row["loss"]} for row in rows],
            y="loss",
            summary=f"Loss from {first['loss']:.4f} to {last['loss']:.4f} in {last['step']} steps.",
        ),
        curves(
            "lr",
            "Learning rate",
            [{"step": row["step"], "rate": row["lr"]} for row in rows],
            y="rate",
            summary=f"Learning rate, {last['lr']:.3g} at last.",
        ),
        curves(
            "rate",
            "Tokens per second",
            [{"step": row["step"], "tokens/s": row["tokens_per_s"]} for row in rows],
            y="tokens/s",
            summary=f"Tokens per second, {last['tokens_per_s']:.4g} in the last step.",
        ),
        step_times(rows, predicted_s=explanation.sections[-1].predicted_s),
        misses(explanation.sections[-1].misses),
    ]
    if evaluated:
        found.append(
            curves(
                "eval",
                "Held-out loss",
                evaluated,
                y="loss",
                summary=f"Held-out loss, {evaluated[-1]['loss']:.4f} at last.",
                has_points=True,
            )
        )
    if explanation.memory:
        found.append(memory(explanation.memory))
    timelines = {"predicted": explanation.predicted}
    if explanation.measured_step is not None:
        timelines["measured"] = explanation.measured_step.timeline
    found.append(gantt(timelines))
    return {chart.name: chart for chart in found}


def _comparison(explanation: Explanation) -> str:
    rows = [
        (row.name, row.lane, row.predicted * 1e3, row.measured * 1e3, _error(row.error))
        for row in explanation.sections[-1].comparison
    ]
    heads = ("phase", "lane", "predicted ms", "measured ms", "error")
    return _details("Predicted and measured, phase by phase", heads, rows)


def _memory(explanation: Explanation) -> str:
    rows = [
        (
            row.name,
            None if row.predicted is None else row.predicted / GIB,
            None if row.measured is None else row.measured / GIB,
            None if row.limit is None else row.limit / GIB,
            _error(row.error),
            row.how,
        )
        for row in explanation.memory
    ]
    heads = ("term", "predicted GiB", "measured GiB", "limit GiB", "error", "how it was measured")
    return _details("Memory, term by term", heads, rows) if rows else ""


def answers(run_dir: Path) -> list[Answer]:
    """Return the first answers to held-out rows, of a run that has none yet an empty list.

    Raises:
        CheckpointError: A file of them is damaged.
    """
    before, after = (
        read_sealed(SAMPLES, file)["rows"][:NUM_SAMPLES] if file.exists() else []
        for file in (run_dir / "samples_before.json", run_dir / "samples_after.json")
    )
    return [
        Answer(
            prompt=(old or new)["prompt"],
            wanted=(old or new)["wanted"],
            before=old and old["got"],
            after=new and new["got"],
        )
        for old, new in itertools.zip_longest(before, after)
    ]


def _samples(run_dir: Path) -> str:
    rows = [(one.prompt, one.wanted, one.before, one.after) for one in answers(run_dir)]
    title, heads = "Answers to held-out rows", ("prompt", "wanted", "before training", "after")
    if not rows:
        return ""
    return f"<h2>{title}</h2>\n<p>{escape(_drawn(run_dir))}</p>\n{table(title, heads, rows)}"


def _drawn(run_dir: Path) -> str:
    """Return after which prompts the answers to held-out rows were drawn."""
    files = (run_dir / "samples_before.json", run_dir / "samples_after.json")
    found = next(read_sealed(SAMPLES, file) for file in files if file.exists())
    said = [
        f"{num:,} after "
        + (f"the prompt with {given}" if given else "the chat template's default prompt")
        for given, num in found["prompts"].items()
    ]
    return f"Answers were drawn: {', '.join(said)}."


def _recipe(run_dir: Path, explanation: Explanation | None) -> str:
    text = RunDir(run_dir).recipe_file.read_text("utf-8")
    seals = "".join(
        f"<p class=soft>Prediction {one.prediction}: <code>{escape(one.sha256)}</code></p>"
        for one in (explanation.sections if explanation else ())
    )
    recipe = _unfolded("Recipe", f"<pre>{escape(text)}</pre>")
    return recipe + (f"<h2>Seals of what was predicted</h2>{seals}" if seals else "")


def _details(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return _unfolded(title, table(title, heads, rows))


def _unfolded(title: str, body: str) -> str:
    return f"<details><summary><b>{escape(title)}</b></summary>\n{body}</details>"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
