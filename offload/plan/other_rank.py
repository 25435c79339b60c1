"""What a rank's plan knows of the other ranks, where they are planned one by one."""

import math
from dataclasses import dataclass, replace

from offload.plan.machine.machine import Machine
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Schedule
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of
from offload.plan.time.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRank:
    """Another rank of a step.

    Attributes:
        machine: Where it computes.
        num_micro_batches: Its share of the step.
        num_slots: Layers on its device at a time.
        num_kept_graphs: How many of its layers are not checkpointed.
        step_s: Its step, if it waited for no other.
        arrivals_s: When it comes to each sum of gradients, by its own simulation.
    """

    machine: Machine
    num_micro_batches: int
    num_slots: int
    num_kept_graphs: int
    step_s: float
    arrivals_s: tuple[float, ...]


def arrivals_of(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return when a rank comes to each sum of gradients.

    Nothing but later sums waits for a sum, so these times depend on no other rank.
    """
    free = replace(costs, network_latency_s=0.0, network_bytes_per_s=math.inf)
    timeline = simulate(schedule, duration_of(free))
    return tuple(span.start_s for span in timeline.spans if span.kind is Kind.REDUCE)
