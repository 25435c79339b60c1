"""When each op started and ended: one type for predicted and measured steps."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.plan.schedule.op import OVER_NETWORK, Kind, Lane, Op


class Span(NamedTuple):
    """The start and end of one op, in seconds from the start of the step.

    `waits` are the positions in the timeline of the ops that had to end before it could start.
    """

    lane: Lane
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
        lane, kind, layer, micro_batch = op[:4]
        return cls(lane, kind, layer, micro_batch, op.num_bytes, start_s, end_s, op.waits)

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
            lane=Lane.COMPUTE,
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
        phases = {
            "step": self.step_s,
            "forward": self.busy_s(Kind.FRONT, Kind.FORWARD, Kind.REFERENCE),
            "decode": self.busy_s(Kind.DECODE),
            "head and loss": self.busy_s(Kind.SCORE, Kind.OBJECTIVE, Kind.TAIL),
            "backward": self.busy_s(Kind.BACKWARD, Kind.FRONT_BACKWARD),
            "h2d": self.busy_s(*(Kind.ROWS, Kind.LOAD, Kind.HEAD, Kind.FETCH, Kind.RETURN)),
            "d2h": self.busy_s(
                *(Kind.STASH, Kind.SEND, Kind.GRADIENT),
            ),
            "reads": self.busy_s(Kind.LOOK_UP, Kind.READ),
            "updates": self.busy_s(Kind.UPDATE),
            "exposed updates": self.exposed_s(Kind.UPDATE),
            "stall": self.stall_s,
        }
        if any(span.lane is Lane.NETWORK for span in self.spans):
            phases["network"] = self.busy_s(*OVER_NETWORK)
            phases["exposed network"] = self.exposed_s(*OVER_NETWORK)
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
                    **row
                    | {
                        "lane": Lane(row["lane"]),
                        "kind": Kind(row["kind"]),
                        "waits": tuple(row["waits"]),
                    }
                )
                for row in json.loads(text)
            )
        )
