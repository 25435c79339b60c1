"""What a weight outside the layers saves and costs where it waits in host memory."""

from dataclasses import dataclass
from typing import Literal

from offload.plan.facts.workload import embedding_bytes, head_bytes, row_buffers_bytes
from offload.plan.plan import Plan
from offload.plan.request import with_workload
from offload.plan.schedule.schedule import slots_bytes
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of, schedule_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceCost:
    """What of a plan is due to such a weight, against the same plan with it on the device."""

    saved_vram_bytes: int  # device memory that it does not take
    h2d_bytes: int  # what more is copied to the device in each step, at most
    num_loads: int  # layers that are loaded again in each step, as the weight was over their slots
    added_s: float  # the time by which it makes the predicted step longer

    @classmethod
    def of(cls, plan: Plan, weight: Literal["embeddings", "head"]) -> "PlaceCost | None":
        """Return the cost of the embedding's or the head's place; None if the device has it."""
        facts, load, costs = plan.facts, plan.request.largest, plan.costs
        slot_bytes, head = (
            max(layer.weight_bytes for layer in costs.layers),
            head_bytes(facts, load),
        )
        saved_bytes = {
            "embeddings": embedding_bytes(facts, load) - row_buffers_bytes(facts, load),
            "head": plan.num_slots * slot_bytes
            - slots_bytes(plan.num_slots, slot_bytes, head)
            + head,
        }[weight]
        if not saved_bytes:
            return None
        plain = schedule_of(
            facts,
            with_workload(plan.request, **{weight: "device"}),
            costs,
            plan.residency,
            is_staged=plan.schedule.is_staged,
        )
        return cls(
            saved_vram_bytes=saved_bytes,
            h2d_bytes=plan.schedule.h2d_bytes - plain.h2d_bytes,
            num_loads=plan.schedule.num_loads - plain.num_loads,
            added_s=plan.predict().step_s - simulate(plain, duration_of(costs)).step_s,
        )
