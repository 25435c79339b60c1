"""What an input embedding or an output head in host memory saves and costs."""

from dataclasses import dataclass

from offload.plan.facts.workload import embedding_bytes, head_bytes, row_buffers_bytes
from offload.plan.plan import Plan
from offload.plan.request import with_workload
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import slots_bytes
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of, schedule_of

_MOVED = (Kind.LOOK_UP, Kind.ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingCost:
    """What of a plan is due to where its embedding is."""

    saved_vram_bytes: int  # device memory that it does not take
    most_h2d_bytes: int  # rows of it that are brought in each step, at most
    look_up_s: float  # predicted time of gathering these
    h2d_s: float  # predicted time of copying them
    added_s: float  # the time by which rows in RAM make the predicted step longer

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


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCost:
    """What of a plan is due to where its head is."""

    saved_vram_bytes: int  # device memory that it does not take
    h2d_bytes: int  # what is copied over slots in each step
    h2d_s: float  # predicted time of these copies on the link
    num_loads: int  # layers under it that are loaded again in each step
    added_s: float  # the time by which a head in RAM makes the predicted step longer

    @classmethod
    def of(cls, plan: Plan) -> "HeadCost | None":
        """Return the cost of a head in host memory; None of one on the device."""
        size = head_bytes(plan.facts, plan.request.largest)
        if not size:
            return None
        slot_bytes = max(layer.weight_bytes for layer in plan.costs.layers)
        beyond = slots_bytes(plan.num_slots, slot_bytes, size) - plan.num_slots * slot_bytes
        plain = schedule_of(
            plan.facts,
            with_workload(plan.request, head="device"),
            plan.costs,
            plan.residency,
            is_staged=plan.schedule.is_staged,
        )
        predicted = plan.predict()
        return cls(
            saved_vram_bytes=size - beyond,
            h2d_bytes=size,
            h2d_s=predicted.busy_s(Kind.HEAD),
            num_loads=plan.schedule.num_loads - plain.num_loads,
            added_s=predicted.step_s - simulate(plain, duration_of(plan.costs)).step_s,
        )
