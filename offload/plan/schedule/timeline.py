"""When each op started and ended: one type for predicted and measured steps."""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.plan.schedule.op import OVER_NETWORK, PHASES, Kind, Lane, Op


class Span(NamedTuple):
    """The start and end of one op, in seconds from the start of the step.

    `waits` are the positions in the timeline of the ops that had to end before it could start.
    """

    kind: Kind
    layer: int | None
    micro_batch: int | None
    num_bytes: int
    start_s: float
    end_s: float
    waits: tuple[int, ...] = ()

    @classmethod
    def of(cls, op: Op, start_s: float, end_s: float) -> "Span":
        """Return the span of an op; by place, as names take twice as long."""
        kind, layer, micro_batch = op[:3]
        return cls(kind, layer, micro_batch, op.num_bytes, start_s, end_s, op.waits)

    @property
    def lane(self) -> Lane:
        """The lane of its kind."""
        return self.kind.lane

    @property
    def duration_s(self) -> float:
        """Length of the span."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The spans of one pass, in issue order."""

    spans: tuple[Span, ...]

    @property
    def step_s(self) -> float:
        """Time from 0 to the end of the last op."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, *kinds: Kind) -> float:
        """Sum of the durations of the ops of these kinds."""
        return sum([span.end_s - span.start_s for span in self.spans if span.kind in kinds])

    @property
    def stall_s(self) -> float:
        """Time in which the compute lane was idle."""
        compute_s = sum(s.duration_s for s in self.spans if s.lane is Lane.COMPUTE)
        return max(0.0, self.step_s - compute_s)

    def exposed_s(self, *kinds: Kind) -> float:
        """Time in which ops of these kinds run on one lane and nothing else is computed."""
        others = (s for s in self.spans if s.lane is Lane.COMPUTE and s.kind not in kinds)
        computing = sorted((s.start_s, s.end_s) for s in others)
        ends_s = [end_s for _, end_s in computing]  # in order too: it is one lane
        exposed_s = 0.0
        for span in (s for s in self.spans if s.kind in kinds):
            now_s, span_end_s = span.start_s, span.end_s
            for number in range(bisect_right(ends_s, now_s), len(computing)):
                start_s, end_s = computing[number]
                if start_s >= span_end_s:
                    break
                exposed_s += max(0.0, start_s - now_s)
                now_s = end_s
            exposed_s += max(0.0, span_end_s - now_s)
        return exposed_s

    def crossings(self) -> Iterator[tuple[int, int]]:
        """List the waits across lanes: positions of the op waited for, and of the waiting op."""
        for number, span in enumerate(self.spans):
            for other in span.waits:
                if self.spans[other].lane is not span.lane:
                    yield other, number

    def with_optimizer(self, optimizer_s: float) -> "Timeline":
        """Return the whole step: the pass, and the update after it."""
        if not optimizer_s:
            return self
        end_s = self.step_s
        update = Span(
            kind=Kind.OPTIMIZER,
            layer=None,
            micro_batch=None,
            num_bytes=0,
            start_s=end_s,
            end_s=end_s + optimizer_s,
        )
        return replace(self, spans=(*self.spans, update))

    def phases(self) -> dict[str, float]:
        """Seconds by phase, with the names of the report.

        Compute phases and `stall` add up to `step`; `h2d`, `d2h`, `reads` and `updates` overlap
        with them. `exposed updates` are the part of `updates` in which nothing else is computed.
        With several ranks there are `network`, what they gather and their sums of gradients, with
        the waits for other ranks, and `exposed network`.
        """
        spent_s = dict.fromkeys(PHASES, 0.0)
        for span in self.spans:
            spent_s[span.kind.phase] += span.duration_s
        phases = {
            "step": self.step_s,
            **spent_s,
            "exposed updates": self.exposed_s(Kind.UPDATE),
            "stall": self.stall_s,
        }
        del phases["optimizer"]  # it comes after the pass
        if any(span.lane is Lane.NETWORK for span in self.spans):
            phases["exposed network"] = self.exposed_s(*OVER_NETWORK)
        else:
            del phases["network"]
        return phases

    def to_json(self) -> str:
        """Return the spans as one JSON array, a row per op."""
        return json.dumps(
            [
                {
                    "lane": span.lane.value,
                    "kind": span.kind.value,
                    "layer": span.layer,
                    "micro_batch": span.micro_batch,
                    "num_bytes": span.num_bytes,
                    "start_s": span.start_s,
                    "end_s": span.end_s,
                    "waits": span.waits,
                }
                for span in self.spans
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Read what `to_json` wrote."""
        return cls(
            spans=tuple(
                Span(
                    **{name: row[name] for name in Span._fields}
                    | {"kind": Kind(row["kind"]), "waits": tuple(row["waits"])}
                )
                for row in json.loads(text)
            )
        )


# ---------------------------------------------------------------------------------------------
# Where a step's time went: parts that add up to it, so that two steps can be subtracted.
#
# The breakdown covers the compute lane from the start of the pass to its end. At each moment the
# lane runs an op, waits for a copy that has not ended, or is idle with nothing to wait for. Ops are
# counted by kind and layer, waits by the kind and layer of the copy that delayed the op, and the
# time after the last op by the copy that ended last. Work of other lanes that overlaps with compute
# is in no part, because it costs no time.

Part = tuple[str, int | None]
"""What the time was spent on, and for which layer; None if for no layer."""

Parts = dict[Part, float]
"""Seconds by part."""

WAIT, IDLE, OUTSIDE, DATA_WAIT = "wait for ", "idle", "outside the pass", "data wait"
OPTIMIZER = Kind.OPTIMIZER.value

_TERMS = {
    **{kind.value: PHASES[kind.phase] for kind in Kind},
    **{WAIT + kind.value: "copy" for kind in Kind},
    **{WAIT + kind.value: "network" for kind in OVER_NETWORK},
    IDLE: "stall",
    OUTSIDE: "host",
    DATA_WAIT: "data wait",
}
"""The term of each part, by the part's name: compute, decode, head and loss, copy, ..."""


def is_part(name: str) -> bool:
    """Return whether a part can have this name."""
    return name in _TERMS


def term_of(name: str) -> str:
    """Return the term that a part's name belongs to."""
    return _TERMS[name]


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


_LANES = {lane: number for number, lane in enumerate(Lane)}


def perfetto_trace(timelines: Mapping[str, Timeline]) -> str:
    """Return a process per timeline, a thread per lane, and arrows where lanes wait for others.

    Args:
        timelines: Name of the process ("predicted", "measured") -> timeline.
    """
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_metadata("process_name", name, process, 0))
        used = {span.lane for span in timeline.spans}
        events += [
            _metadata("thread_name", lane.value, process, thread)
            for lane, thread in _LANES.items()
            if lane in used
        ]
        events += [
            {
                "ph": "X",
                "name": span.kind.value
                if span.layer is None
                else f"{span.kind.value} {span.layer}",
                "cat": span.kind.value,
                "pid": process,
                "tid": _LANES[span.lane],
                "ts": span.start_s * 1e6,
                "dur": span.duration_s * 1e6,
                "args": {
                    "layer": span.layer,
                    "micro_batch": span.micro_batch,
                    "bytes": span.num_bytes,
                },
            }
            for span in timeline.spans
        ]
        for number, (first, second) in enumerate(timeline.crossings()):
            source, target = timeline.spans[first], timeline.spans[second]
            shared = {"name": "wait", "cat": "wait", "id": f"{process}.{number}", "pid": process}
            events += [  # an arrow, each end of which is bound to the op at that position
                shared | {"ph": "s", "tid": _LANES[source.lane], "ts": source.start_s * 1e6},
                shared
                | {"ph": "f", "bp": "e", "tid": _LANES[target.lane], "ts": target.start_s * 1e6},
            ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(what: str, name: str, process: int, thread: int) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
