"""How device memory is divided between slots and layers that are not checkpointed (kept graphs).

One more slot saves two loads in every step; one more kept graph saves the recompute of its layer.
Slots pay while loads bound the step, graphs while compute does. The bound R3 says which of the two
it is in a fraction of a millisecond; it is within a thousandth of the simulated time.
"""

from dataclasses import replace

from offload.plan.fit import Needs
from offload.plan.memory.memory import input_bytes
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs

SAME_FRAC = 1e-6  # times that differ by less are the same
WORTH_FRAC = 0.01  # of the step: smaller gains are not worth a slot, in case the link is slower


def bound_of(needs: Needs, costs: Costs, *, num_slots: int, num_kept_graphs: int) -> float:
    """Return the lower bound on the time of a request's step, optimizer included."""
    request = needs.request
    bound_s = r3_bound_s(
        costs,
        num_slots=num_slots,
        num_micro_batches=request.rank_micro_batches,
        stashed_bytes=input_bytes(needs.facts, request.typical) if request.is_stashed else 0,
        num_kept_graphs=num_kept_graphs,
        is_staged=needs.is_staged,
    )
    return bound_s + costs.optimizer_s


def shared_out(needs: Needs, costs: Costs) -> tuple[int, int] | None:
    """Return the numbers of slots and kept graphs with which a request's step is fastest.

    Each further slot leaves room for fewer graphs. A binary search finds the number of slots at
    which the step stops being load-bound; beyond it, memory is better spent on layers that skip
    recomputation. Among numbers of slots that leave room for the same graphs, the largest is taken.
    If graphs would gain less than `WORTH_FRAC`, slots get all the memory. On a CPU slots come
    first: there a load slows concurrent visits, which the plan does not price.

    Returns:
        The two numbers, or None if the request does not fit at all.
    """
    low, high = needs.fewest_slots, needs.most_slots
    if high is None:
        return None
    most = high, needs.most_graphs(high)
    if needs.machine.device == "cpu" or most[1] == needs.facts.num_layers:
        return most

    rate = min(costs.h2d_bytes_per_s, costs.read_bytes_per_s)  # staged bytes are read first
    at = replace(costs, h2d_bytes_per_s=rate) if needs.is_staged else costs

    def bound_s(num_slots: int) -> float:
        num_graphs = needs.most_graphs(num_slots)
        return bound_of(needs, at, num_slots=num_slots, num_kept_graphs=num_graphs)

    while low < high:
        middle = (low + high) // 2
        if bound_s(middle + 1) < bound_s(middle) * (1 - SAME_FRAC):
            low = middle + 1
        else:
            high = middle
    if bound_s(low) >= bound_s(most[0]) * (1 - WORTH_FRAC):
        return most
    num_graphs = needs.most_graphs(low)
    while needs.most_graphs(low + 1) == num_graphs:
        low += 1
    return low, num_graphs
