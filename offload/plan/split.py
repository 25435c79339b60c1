"""How device memory is divided between slots and layers that are not checkpointed (kept graphs).

One more slot saves two loads in every step; one more kept graph saves the recompute of its layer.
Slots pay while loads bound the step, graphs while compute does. The bound R3 says which of the two
it is in a fraction of a millisecond; it is within a thousandth of the simulated time.
"""

from dataclasses import replace

from offload.plan.fit import MemoryNeeds
from offload.plan.memory.memory import input_bytes
from offload.plan.schedule.residency import Residency
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs

SAME_FRAC = 1e-6  # times that differ by less are the same
WORTH_FRAC = 0.01  # of the step: smaller gains are not worth a slot, in case the link is slower


def bound_of(needs: MemoryNeeds, costs: Costs, residency: Residency) -> float:
    """Return the lower bound on the time of a request's step, optimizer included."""
    request = needs.request
    bound_s = r3_bound_s(
        costs,
        num_slots=residency.num_slots,
        num_micro_batches=request.rank_micro_batches,
        stashed_bytes=input_bytes(needs.facts, request.typical) if request.is_stashed else 0,
        num_kept_graphs=residency.num_kept_graphs,
        is_staged=needs.is_staged,
    )
    return bound_s + costs.optimizer_s


def fastest_residency(needs: MemoryNeeds, costs: Costs) -> Residency | None:
    """Return the numbers of slots and kept graphs with which a request's step is fastest.

    Each further slot leaves room for fewer graphs. A binary search finds the number of slots at
    which the step stops being load-bound; beyond it, memory is better spent on layers that skip
    recomputation. Among numbers of slots that leave room for the same graphs, the largest is taken.
    If graphs would gain less than `WORTH_FRAC`, slots get all the memory. On a CPU slots come
    first: there a load slows concurrent visits, which the plan does not price.

    Returns:
        The residency, or None if the request does not fit at all.
    """
    low, high = needs.fewest.num_slots, needs.most_slots
    if high is None:
        return None
    most = needs.with_graphs(high)
    if needs.machine.device == "cpu" or most.num_kept_graphs == needs.facts.num_layers:
        return most

    rate = min(costs.h2d_bytes_per_s, costs.read_bytes_per_s)  # staged bytes are read first
    at = replace(costs, h2d_bytes_per_s=rate) if needs.is_staged else costs

    def bound_s(num_slots: int) -> float:
        return bound_of(needs, at, needs.with_graphs(num_slots))

    while low < high:
        middle = (low + high) // 2
        if bound_s(middle + 1) < bound_s(middle) * (1 - SAME_FRAC):
            low = middle + 1
        else:
            high = middle
    if bound_s(low) >= bound_s(most.num_slots) * (1 - WORTH_FRAC):
        return most
    fastest = needs.with_graphs(low)
    while (more := needs.with_graphs(low + 1)).num_kept_graphs == fastest.num_kept_graphs:
        fastest, low = more, low + 1
    return fastest
