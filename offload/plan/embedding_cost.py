"""What an input embedding in host memory saves and costs."""

from collections import Counter
from dataclasses import dataclass

from offload.plan.facts.embedding import (
    embedding_bytes,
    new_row_gradients_bytes,
    num_trained_on_host,
    row_buffers_bytes,
    row_sum_bytes,
)
from offload.plan.plan import Plan
from offload.plan.schedule.op import Kind
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of

_MOVED = (Kind.LOOK_UP, Kind.ROWS, Kind.ROW_GRADIENTS, Kind.ADD_ROWS, Kind.REDUCE_ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradientCost:
    """What the gradients by rows of one that trains cost in each step.

    Attributes:
        most_d2h_bytes: What comes from the device, at most.
        d2h_s: Predicted time of that on the link.
        add_s: Predicted time of adding it up.
        most_reduced_bytes: What a rank that updates it gets from the others, at most.
        reduce_s: Predicted time of that.
    """

    most_d2h_bytes: int
    d2h_s: float
    add_s: float
    most_reduced_bytes: int
    reduce_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingCost:
    """What of a plan is due to where its embedding is.

    Attributes:
        saved_vram_bytes: Device memory that it does not take, and its gradients if it trains.
        most_h2d_bytes: Rows of it that are brought in each step, at most.
        look_up_s: Predicted time of gathering these.
        h2d_s: Predicted time of copying them.
        added_s: By what a step is predicted to be longer than if rows took no time.
        gradients: Of one that trains.
    """

    saved_vram_bytes: int
    most_h2d_bytes: int
    look_up_s: float
    h2d_s: float
    added_s: float
    gradients: RowGradientCost | None

    @classmethod
    def of(cls, plan: Plan) -> "EmbeddingCost | None":
        """Return the cost of an embedding in host memory; None of one on the device."""
        facts, load, duration_s = plan.facts, plan.request.largest, duration_of(plan.costs)
        if load.embeddings == "device":
            return None
        free = simulate(plan.schedule, lambda op: 0.0 if op.kind in _MOVED else duration_s(op))
        timeline, sent = plan.predict(), Counter[Kind]()
        for op in plan.schedule.ops:
            sent[op.kind] += op.num_bytes
        saved = embedding_bytes(facts, load) + row_sum_bytes(facts, load)
        saved -= row_buffers_bytes(facts, load) + new_row_gradients_bytes(facts, load)
        gradients = RowGradientCost(
            most_d2h_bytes=sent[Kind.ROW_GRADIENTS],
            d2h_s=timeline.busy_s(Kind.ROW_GRADIENTS),
            add_s=timeline.busy_s(Kind.ADD_ROWS),
            most_reduced_bytes=sent[Kind.REDUCE_ROWS],
            reduce_s=timeline.busy_s(Kind.REDUCE_ROWS),
        )
        return cls(
            saved_vram_bytes=saved,
            most_h2d_bytes=sent[Kind.ROWS],
            look_up_s=timeline.busy_s(Kind.LOOK_UP),
            h2d_s=timeline.busy_s(Kind.ROWS),
            added_s=timeline.step_s - free.step_s,
            gradients=gradients if num_trained_on_host(facts, load) else None,
        )
