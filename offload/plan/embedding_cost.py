"""What an input embedding in host memory saves and costs."""

from dataclasses import dataclass

from offload.plan.facts.workload import (
    embedding_bytes,
    row_buffers_bytes,
)
from offload.plan.plan import Plan
from offload.plan.schedule.op import Kind
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of

_MOVED = (Kind.LOOK_UP, Kind.ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingCost:
    """What of a plan is due to where its embedding is.

    Attributes:
        saved_vram_bytes: Device memory that it does not take.
        most_h2d_bytes: Rows of it that are brought in each step, at most.
        look_up_s: Predicted time of gathering these.
        h2d_s: Predicted time of copying them.
        added_s: By what a step is predicted to be longer than if rows took no time.
    """

    saved_vram_bytes: int
    most_h2d_bytes: int
    look_up_s: float
    h2d_s: float
    added_s: float

    @classmethod
    def of(cls, plan: Plan) -> "EmbeddingCost | None":
        """Return the cost of an embedding in host memory; None of one on the device."""
        facts, load, duration_s = plan.facts, plan.request.largest, duration_of(plan.costs)
        if load.embeddings == "device":
            return None
        free = simulate(plan.schedule, lambda op: 0.0 if op.kind in _MOVED else duration_s(op))
        timeline = plan.predict()
        return cls(
            saved_vram_bytes=embedding_bytes(facts, load) - row_buffers_bytes(facts, load),
            most_h2d_bytes=sum(x.num_bytes for x in plan.schedule.ops if x.kind is Kind.ROWS),
            look_up_s=timeline.busy_s(Kind.LOOK_UP),
            h2d_s=timeline.busy_s(Kind.ROWS),
            added_s=timeline.step_s - free.step_s,
        )
