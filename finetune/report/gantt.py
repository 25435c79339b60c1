"""A step as a drawing: timelines stacked on one time axis, with a row for each lane.

The SVG is written without a library: it opens in any browser, and hovering over a bar shows its
op. Ops narrower than MIN_WIDTH are merged into one bar with their neighbours of the same kind; of
bars that are still narrower, the longest in each pixel is drawn. So the file stays small however
many ops there are; the drawing says how many.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.timeline import Span, Timeline

WIDTH, LEFT, RIGHT = 1500, 90, 20  # the page; next to the axis: names of lanes, margin
ROW, BAR, HEADING, LEGEND, AXIS = 26, 20, 30, 30, 24
MIN_WIDTH = 1.0  # of a bar, in pixels
LABEL_WIDTH = 22.0  # from this width on a layer's number fits in
NUM_TICKS = 16

COLOURS = {
    Kind.LOOK_UP: "#969696",
    Kind.ROWS: "#fdbf6f",
    Kind.FRONT: "#8da0cb",
    Kind.READ: "#bdbdbd",
    Kind.UPDATE: "#b15928",
    Kind.LOAD: "#fc8d62",
    Kind.DECODE: "#e5c494",
    Kind.FORWARD: "#66c2a5",
    Kind.STASH: "#b3b3cc",
    Kind.SEND: "#9e9ac8",
    Kind.REFERENCE: "#b2df8a",
    Kind.HEAD: "#fb8072",
    Kind.SCORE: "#f1b6da",
    Kind.OBJECTIVE: "#c51b7d",
    Kind.TAIL: "#e78ac3",
    Kind.FETCH: "#ffd92f",
    Kind.RETURN: "#d9b300",
    Kind.BACKWARD: "#4c9ac9",
    Kind.GRADIENT: "#a6761d",
    Kind.FRONT_BACKWARD: "#7570b3",
    Kind.GATHER: "#1b9e77",
    Kind.REDUCE: "#d95f02",
    Kind.OPTIMIZER: "#a6d854",
}


@dataclass(kw_only=True, slots=True)
class _Bar:
    """One op, or neighbours of one kind that are too narrow to be drawn apart."""

    first: Span
    start_s: float
    end_s: float
    num_ops: int = 1
    num_hidden: int = 0  # ops of other kinds in the same pixel, which are not drawn

    @property
    def duration_s(self) -> float:
        """Length of the bar."""
        return self.end_s - self.start_s


def gantt_svg(timelines: Mapping[str, Timeline], *, width: int = WIDTH) -> str:
    """Return the drawing.

    Args:
        timelines: Heading -> timeline, from top to bottom.
        width: Of the drawing, in pixels; a wider one merges fewer ops.
    """
    axis_s = max((timeline.step_s for timeline in timelines.values()), default=0.0) or 1.0
    per_s = (width - LEFT - RIGHT) / axis_s
    body: list[str] = []
    top, num_ops, num_bars, kinds = LEGEND + 4, 0, 0, set()
    for heading, timeline in timelines.items():
        lanes = [lane for lane in Lane if any(span.lane is lane for span in timeline.spans)]
        body.append(_text(10, top + 20, heading, size=14))
        top += HEADING
        for lane in lanes:
            spans = [span for span in timeline.spans if span.lane is lane]
            bars = _seen(_merged(spans, min_s=MIN_WIDTH / per_s), min_s=MIN_WIDTH / per_s)
            body.append(_text(10, top + 15, lane.value))
            body += [_rect(bar, top, per_s) for bar in bars]
            num_ops, num_bars = num_ops + len(spans), num_bars + len(bars)
            kinds |= {span.kind for span in spans}
            top += ROW
        body += _axis(top, axis_s, width, height=ROW * len(lanes))
        top += AXIS + 8
    note = f"{num_ops} ops in {num_bars} bars: of ops narrower than a pixel the longest"
    body.append(_text(10, top + 14, note))
    height = top + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    legend = _legend([kind for kind in Kind if kind in kinds])
    return "\n".join([head, paper, *legend, *body, "</svg>"]) + "\n"


def _merged(spans: Sequence[Span], *, min_s: float) -> list[_Bar]:
    """Merge ops that are too narrow into one bar, as long as kind is equal and there is no gap."""
    bars: list[_Bar] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        last = bars[-1] if bars else None
        if (
            last is not None
            and last.first.kind is span.kind
            and span.start_s - last.end_s < min_s
            and min(span.duration_s, last.end_s - last.start_s) < min_s
        ):
            last.end_s = max(last.end_s, span.end_s)
            last.num_ops += 1
        else:
            bars.append(_Bar(first=span, start_s=span.start_s, end_s=span.end_s))
    return bars


def _seen(bars: Sequence[_Bar], *, min_s: float) -> list[_Bar]:
    """Leave out bars that others would hide: of the narrow ones in a pixel the longest stays."""
    longest: dict[int, _Bar] = {}
    seen: list[_Bar] = []
    for bar in bars:
        if bar.duration_s >= min_s:
            seen.append(bar)
            continue
        pixel = int(bar.start_s / min_s)
        held = longest.setdefault(pixel, bar)
        if held is bar:
            continue
        kept, hidden = (bar, held) if bar.duration_s > held.duration_s else (held, bar)
        kept.num_hidden += hidden.num_ops + hidden.num_hidden
        longest[pixel] = kept
    return sorted([*seen, *longest.values()], key=lambda bar: bar.start_s)


def _rect(bar: _Bar, top: int, per_s: float) -> str:
    width = max(MIN_WIDTH, (bar.end_s - bar.start_s) * per_s)
    x, layer = LEFT + bar.start_s * per_s, bar.first.layer
    rect = (
        f'<rect x="{x:.2f}" y="{top + 2}" width="{width:.2f}" height="{BAR}"'
        f' fill="{COLOURS[bar.first.kind]}"><title>{escape(_hover_text(bar))}</title></rect>'
    )
    if layer is None or bar.num_ops > 1 or width < LABEL_WIDTH:
        return rect
    number = f'<text class="inside" x="{x + width / 2:.1f}" y="{top + 16:.1f}" font-size="10"'
    return f'{rect}{number} text-anchor="middle">{layer}</text>'


def _hover_text(bar: _Bar) -> str:
    span, when = bar.first, f"{bar.start_s * 1e3:.3f} to {bar.end_s * 1e3:.3f} ms"
    if bar.num_hidden:
        when += f", and {bar.num_hidden} narrower"
    if bar.num_ops > 1:
        return f"{bar.num_ops} x {span.kind.value}: {when}"
    layer = "" if span.layer is None else f" of layer {span.layer}"
    micro_batch = "" if span.micro_batch is None else f", micro-batch {span.micro_batch}"
    moved = f", {span.num_bytes:,} bytes" if span.num_bytes else ""
    return f"{span.kind.value}{layer}{micro_batch}{moved}: {when}"


def _axis(top: int, axis_s: float, width: int, *, height: int) -> Iterator[str]:
    """Draw a line under the rows, with a mark and a thin line upwards at round times."""
    yield f'<path d="M{LEFT} {top}H{width - RIGHT}" stroke="#555555"/>'
    per_s = (width - LEFT - RIGHT) / axis_s
    step_s = _round_up(axis_s / max(4, NUM_TICKS * width // WIDTH))
    unit, factor = ("s", 1.0) if axis_s >= 1 else ("ms", 1e3)
    for number in range(int(axis_s / step_s) + 1):
        x = LEFT + number * step_s * per_s
        yield (
            f'<path d="M{x:.2f} {top - height}V{top + 4}" stroke="#555555" stroke-opacity="0.25"/>'
        )
        label = f"{number * step_s * factor:.6g} {unit}"
        yield _text(x, top + 16, label, size=10, anchor="middle")


def _round_up(seconds: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** int(f"{seconds:e}".partition("e")[2])
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= seconds * 0.999)


def _legend(kinds: Sequence[Kind]) -> Iterator[str]:
    x = 10
    for kind in kinds:
        name = kind.value.replace("_", " ")
        yield f'<rect x="{x}" y="8" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield _text(x + 17, 18, name)
        x += 34 + 7 * len(name)


def _text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
