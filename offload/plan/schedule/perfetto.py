"""Timelines as a Chrome trace, which https://ui.perfetto.dev reads."""

import json
from collections.abc import Mapping

from offload.plan.schedule.op import Lane
from offload.plan.schedule.timeline import Span, Timeline

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
        events += [_complete_event(span, process) for span in timeline.spans]
        for number, (source, target) in enumerate(timeline.crossings()):
            events += _flow(timeline.spans[source], timeline.spans[target], process, number)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(what: str, name: str, process: int, thread: int) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete_event(span: Span, process: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.kind.value if span.layer is None else f"{span.kind.value} {span.layer}",
        "cat": span.kind.value,
        "pid": process,
        "tid": _LANES[span.lane],
        "ts": span.start_s * 1e6,
        "dur": span.duration_s * 1e6,
        "args": {"layer": span.layer, "micro_batch": span.micro_batch, "bytes": span.num_bytes},
    }


def _flow(source: Span, target: Span, process: int, number: int) -> list[dict[str, object]]:
    """Draw an arrow from one op to another; each end is bound to the op at that position."""
    shared = {"name": "wait", "cat": "wait", "id": f"{process}.{number}", "pid": process}
    return [
        shared | {"ph": "s", "tid": _LANES[source.lane], "ts": source.start_s * 1e6},
        shared | {"ph": "f", "bp": "e", "tid": _LANES[target.lane], "ts": target.start_s * 1e6},
    ]
