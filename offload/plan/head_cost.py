"""What an output head in host memory saves and costs, against the same slots with it elsewhere."""

from dataclasses import dataclass

from offload.plan.facts.workload import head_bytes
from offload.plan.plan import Plan
from offload.plan.request import with_head
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import slots_bytes
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of, schedule_of


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCost:
    """What of a plan is due to where its head is.

    Attributes:
        saved_vram_bytes: Device memory that it does not take.
        h2d_bytes: What is copied over slots in each step.
        h2d_s: Predicted time of these copies on the link.
        num_loads: Layers under it that are loaded again in each step.
        added_s: By what a step is predicted to be longer.
    """

    saved_vram_bytes: int
    h2d_bytes: int
    h2d_s: float
    num_loads: int
    added_s: float

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
            with_head(plan.request, "device"),
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
