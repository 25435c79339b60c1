"""Where a step's time went: parts that add up to it, so that two steps can be subtracted.

The breakdown covers the compute lane from the start of the pass to its end. At each moment the lane
runs an op, waits for a copy that has not ended, or is idle with nothing to wait for. Ops are
counted by kind and layer, waits by the kind and layer of the copy that delayed the op, and the time
after the last op by the copy that ended last. Work of other lanes that overlaps with compute is in
no part, because it costs no time.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from offload.plan.schedule.op import OVER_NETWORK, Kind, Lane
from offload.plan.schedule.timeline import Span, Timeline

Part = tuple[str, int | None]
"""What the time was spent on, and for which layer; None if for no layer."""

Parts = dict[Part, float]
"""Seconds by part."""

WAIT, IDLE, OUTSIDE, DATA_WAIT = "wait for ", "idle", "outside the pass", "data wait"
OPTIMIZER = Kind.OPTIMIZER.value

_TERMS = {
    Kind.FRONT.value: "compute",
    Kind.FORWARD.value: "compute",
    Kind.REFERENCE.value: "compute",
    Kind.BACKWARD.value: "compute",
    Kind.FRONT_BACKWARD.value: "compute",
    Kind.DECODE.value: "decode",
    Kind.SCORE.value: "head and loss",
    Kind.OBJECTIVE.value: "head and loss",
    Kind.TAIL.value: "head and loss",
    OPTIMIZER: "optimizer",
    Kind.UPDATE.value: "optimizer",
    IDLE: "stall",
    OUTSIDE: "host",
    DATA_WAIT: "data wait",
}


def is_part(name: str) -> bool:
    """Return whether a part can have this name."""
    return name.startswith(WAIT) or name in _TERMS


def term_of(name: str) -> str:
    """Return the term that a part's name belongs to: compute, decode, head and loss, copy, ..."""
    if name in [WAIT + kind.value for kind in OVER_NETWORK]:
        return "network"
    return "copy" if name.startswith(WAIT) else _TERMS[name]


def parts_of(timeline: Timeline) -> Parts:
    """Return the parts of a pass; they add up to its `step_s`."""
    parts: Parts = defaultdict(float)
    now_s = 0.0
    for span in timeline.spans:
        if span.lane is not Lane.COMPUTE:
            continue
        gap_s = max(0.0, span.start_s - now_s)
        if gap_s:
            cause = _last([timeline.spans[i] for i in span.waits])
            waited_s = min(gap_s, max(0.0, cause.end_s - now_s)) if cause else 0.0
            if cause is not None and waited_s:
                parts[WAIT + cause.kind.value, cause.layer] += waited_s
            if gap_s > waited_s:
                parts[IDLE, None] += gap_s - waited_s
        parts[span.kind.value, span.layer] += max(0.0, span.end_s - max(span.start_s, now_s))
        now_s = max(now_s, span.end_s)
    last = _last(timeline.spans)
    if last is not None and last.end_s > now_s:
        parts[WAIT + last.kind.value, last.layer] += last.end_s - now_s
    return dict(parts)


def _last(spans: Sequence[Span]) -> Span | None:
    """Return the span that ends last; after the end of the last visit it can only be a transfer."""
    return max(spans, key=lambda span: span.end_s, default=None)


def mean_parts(steps: Sequence[Parts]) -> Parts:
    """Return the mean of each part; the means add up to the mean of the steps."""
    keys = dict.fromkeys(key for parts in steps for key in parts)
    return {key: sum(parts.get(key, 0.0) for parts in steps) / len(steps) for key in keys}


# ------------------------------------------------------------------------------------- as JSON

DIGITS = 9  # of a second


def parts_json(parts: Parts) -> dict[str, float | list[float]]:
    """Return name -> seconds, or seconds by layer from layer 0."""
    written: dict[str, float | list[float]] = {}
    for name in dict.fromkeys(name for name, _ in parts):
        layers = {layer: seconds for (n, layer), seconds in parts.items() if n == name}
        if None in layers:
            written[name] = round(layers[None], DIGITS)
            continue
        last = max(layer for layer in layers if layer is not None)
        written[name] = [round(layers.get(layer, 0.0), DIGITS) for layer in range(last + 1)]
    return written


def parts_from_json(written: Mapping[str, float | list[float]]) -> Parts:
    """Read what `parts_json` wrote."""
    parts: Parts = {}
    for name, seconds in written.items():
        if isinstance(seconds, list):
            parts |= {(name, layer): value for layer, value in enumerate(seconds) if value}
        else:
            parts[name, None] = seconds
    return parts


# ---------------------------------------------------------------------------------- differences


def difference(predicted: Parts, measured: Parts) -> Parts:
    """Return measured minus predicted for each part; the sum is the error of the whole step."""
    keys = dict.fromkeys((*predicted, *measured))
    return {key: measured.get(key, 0.0) - predicted.get(key, 0.0) for key in keys}


def by_name(parts: Parts) -> dict[str, float]:
    """Add up the layers of each part."""
    sums: dict[str, float] = defaultdict(float)
    for (name, _), seconds in parts.items():
        sums[name] += seconds
    return dict(sums)


def layers_of(parts: Parts, name: str, *, share: float = 0.8) -> tuple[int, ...]:
    """Return the fewest layers that make up most of a part, or nothing if it has no layers.

    Args:
        parts: As `difference` returns them.
        name: Of the part.
        share: Fraction to reach, of the total of the layers whose sign is that of the sum.
    """
    layers = {layer: s for (n, layer), s in parts.items() if n == name and layer is not None}
    sign = 1 if sum(layers.values()) >= 0 else -1
    wanted_s = share * sum(s * sign for s in layers.values() if s * sign > 0)
    found, seconds = [], 0.0
    for layer in sorted(layers, key=lambda layer: -layers[layer] * sign):
        if seconds >= wanted_s:
            break
        found.append(layer)
        seconds += layers[layer] * sign
    return tuple(sorted(found))
