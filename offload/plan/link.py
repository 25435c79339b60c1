"""What link between the ranks a step needs, so that adding up their gradients costs no time."""

import math
from dataclasses import replace

from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Schedule
from offload.plan.schedule.simulate import simulate
from offload.plan.step import FREE_FRAC, duration_of
from offload.plan.time.costs import Costs

LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1e3, 1e13
PRECISION = 1.01


def hidden_frac(schedule: Schedule, costs: Costs) -> float:
    """Return the part of the network's time in which something is computed."""
    timeline = simulate(schedule, duration_of(costs))
    return 1 - timeline.exposed_s(Kind.REDUCE) / timeline.busy_s(Kind.REDUCE)


def needed_bytes_per_s(schedule: Schedule, costs: Costs) -> float:
    """Return the least rate with which a step takes at most `FREE_FRAC` longer than without bytes.

    A faster link makes no step longer, so a binary search finds it, to a hundredth.

    Returns:
        `MOST_BYTES_PER_S` if no slower one is enough.
    """

    def step_s(bytes_per_s: float) -> float:
        there = replace(costs, network_bytes_per_s=bytes_per_s)
        return simulate(schedule, duration_of(there)).step_s

    allowed_s = (1 + FREE_FRAC) * step_s(math.inf)
    slow, fast = LEAST_BYTES_PER_S, MOST_BYTES_PER_S
    if step_s(slow) <= allowed_s:
        return slow
    while fast > PRECISION * slow:
        middle = math.sqrt(slow * fast)
        slow, fast = (slow, middle) if step_s(middle) <= allowed_s else (middle, fast)
    return fast
