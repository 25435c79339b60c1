"""What link between the ranks a step needs, so that adding up their gradients costs no time."""

import math
from dataclasses import replace

from offload.plan.schedule.op import OVER_NETWORK, Kind
from offload.plan.schedule.schedule import Schedule
from offload.plan.schedule.simulate import times_s
from offload.plan.schedule.timeline import Timeline
from offload.plan.step import FREE_FRAC, duration_of
from offload.plan.time.costs import Costs

LEAST_BYTES_PER_S = 1.0


def hidden_frac(timeline: Timeline) -> float:
    """Return the part of the network's time in which something is computed."""
    return 1 - timeline.exposed_s(*OVER_NETWORK) / timeline.busy_s(*OVER_NETWORK)


def needed_bytes_per_s(schedule: Schedule, costs: Costs) -> float:
    """Return the least rate with which a step takes at most `FREE_FRAC` longer than without bytes.

    Only later sums wait for a sum. So over a network without limit each begins when its gradients
    are final, or when the one before it ends; from that time on, its bytes and all later ones have
    to be through by the end that is allowed, and what sums take there is not theirs. Where visits
    wait for what is gathered, the rate is searched for, to a hundredth.
    """
    if any(op.kind is Kind.GATHER for op in schedule.ops):
        return _searched_bytes_per_s(schedule, costs)
    at_once = duration_of(replace(costs, network_bytes_per_s=math.inf))
    starts_s, ends_s = times_s(schedule, at_once)
    allowed_s = (1 + FREE_FRAC) * max(ends_s, default=0.0)
    needed, num_bytes, own_s = 0.0, 0, 0.0
    for op, start_s in zip(reversed(schedule.ops), reversed(starts_s), strict=True):
        if op.kind is Kind.REDUCE:
            num_bytes += op.num_bytes
            own_s += at_once(op)
            needed = max(needed, num_bytes / (allowed_s - start_s - own_s))
    return needed


def _searched_bytes_per_s(schedule: Schedule, costs: Costs) -> float:
    def step_s(bytes_per_s: float) -> float:
        at_rate = replace(costs, network_bytes_per_s=bytes_per_s)
        return max(times_s(schedule, duration_of(at_rate))[1], default=0.0)

    allowed_s = (1 + FREE_FRAC) * step_s(math.inf)
    low, high = LEAST_BYTES_PER_S, schedule.network_bytes / (FREE_FRAC * allowed_s)
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if step_s(middle) <= allowed_s else (middle, high)
    return high
