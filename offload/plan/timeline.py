"""When each op started and ended: one type for what was predicted and what was measured."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offload.plan.op import Kind, Lane


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One op's place in time, in seconds from the start of the step."""

    lane: Lane
    kind: Kind
    layer: int | None
    micro_batch: int | None
    num_bytes: int
    start_s: float
    end_s: float

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
        return sum(span.duration_s for span in self.spans if span.kind in kinds)

    @property
    def stall_s(self) -> float:
        """Time in which the compute lane stood still."""
        compute_s = sum(s.duration_s for s in self.spans if s.lane is Lane.COMPUTE)
        return max(0.0, self.step_s - compute_s)

    def phases(self) -> dict[str, float]:
        """Seconds by phase, as the report names them.

        Compute phases and `stall` add up to `step`; `h2d` and `d2h` run beside them.
        """
        return {
            "step": self.step_s,
            "forward": self.busy_s(Kind.FRONT, Kind.FORWARD),
            "decode": self.busy_s(Kind.DECODE),
            "head and loss": self.busy_s(Kind.TAIL),
            "backward": self.busy_s(Kind.BACKWARD, Kind.FRONT_BACKWARD),
            "h2d": self.busy_s(Kind.LOAD, Kind.FETCH),
            "d2h": self.busy_s(Kind.STASH, Kind.GRADIENT),
            "stall": self.stall_s,
        }

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
                }
                for span in self.spans
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Read what `to_json` wrote."""
        return cls(
            spans=tuple(
                Span(**row | {"lane": Lane(row["lane"]), "kind": Kind(row["kind"])})
                for row in json.loads(text)
            )
        )


def perfetto_trace(timelines: Mapping[str, Timeline]) -> str:
    """Return a Chrome trace, which Perfetto reads: a process per timeline, a thread per lane.

    Args:
        timelines: Name of the track group ("predicted", "measured") -> timeline.
    """
    events: list[dict[str, object]] = []
    lanes = {lane: number for number, lane in enumerate(Lane)}
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_metadata("process_name", name, process, 0))
        for lane, thread in lanes.items():
            events.append(_metadata("thread_name", lane.value, process, thread))
        events += _complete_events(timeline.spans, process, lanes)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(what: str, name: str, process: int, thread: int) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete_events(
    spans: Iterable[Span], process: int, lanes: Mapping[Lane, int]
) -> list[dict[str, object]]:
    return [
        {
            "ph": "X",
            "name": span.kind.value if span.layer is None else f"{span.kind.value} {span.layer}",
            "pid": process,
            "tid": lanes[span.lane],
            "ts": span.start_s * 1e6,
            "dur": span.duration_s * 1e6,
            "args": {"micro_batch": span.micro_batch, "bytes": span.num_bytes},
        }
        for span in spans
    ]
