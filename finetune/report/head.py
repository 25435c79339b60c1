"""An output head that waits in RAM: what it saves and costs, for people and for programs."""

from typing import Any

from finetune.report.format import shown_gib, shown_time
from offload.plan.facts.head import head_bytes
from offload.plan.plan import Plan
from offload.plan.request import with_head
from offload.plan.schedule.head import slots_bytes
from offload.plan.schedule.op import Kind
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of, schedule_of


def head_json(plan: Plan) -> dict[str, Any]:
    """Return what a head in host memory saves and costs; nothing of one on the device.

    The cost is against the same slots with the head on the device.
    """
    size = head_bytes(plan.facts, plan.request.largest)
    if not size:
        return {}
    slot_bytes = max(layer.weight_bytes for layer in plan.costs.layers)
    num_slots = plan.num_slots
    beyond = slots_bytes(num_slots, slot_bytes, size) - num_slots * slot_bytes
    plain = schedule_of(
        plan.facts,
        with_head(plan.request, "device"),
        plan.costs,
        plan.residency,
        is_staged=plan.schedule.is_staged,
    )
    predicted = plan.predict()
    cost = {
        "saved_vram_bytes": size - beyond,
        "h2d_bytes": size,
        "h2d_s": predicted.busy_s(Kind.HEAD),
        "num_loads": plan.schedule.num_loads - plain.num_loads,
        "added_s": predicted.step_s - simulate(plain, duration_of(plan.costs)).step_s,
    }
    return {"head": cost}


def head_line(plan: Plan) -> str:
    """Return the same for people."""
    cost = head_json(plan)["head"]
    more = cost["num_loads"]
    return (
        f"in RAM (`offload.head: host`): {shown_gib(cost['saved_vram_bytes'])} less of device"
        f" memory; copied over slots once per step, and {more} loads more, which is"
        f" {shown_time(cost['added_s'])} longer"
    )
