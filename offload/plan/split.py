"""How the device's memory is shared out between slots and kept graphs.

A slot more saves two loads in every step, a kept graph one recompute of its layer. While loads
bound the step slots pay, and graphs where visits do. The bound R3 tells the two apart in a fraction
of a millisecond, and is the simulated time or within a thousandth of it.
"""

from dataclasses import replace

from offload.plan.bounds import r3_bound_s
from offload.plan.costs import Costs
from offload.plan.fit import Needs
from offload.plan.memory import input_bytes

SAME_FRAC = 1e-6  # times that differ by less are the same
WORTH_FRAC = 0.01  # of the step: for less no slot is given up, which a slower link would miss


def bound_of(needs: Needs, costs: Costs, *, num_slots: int, num_kept_graphs: int) -> float:
    """Return what a request's step cannot be faster than, optimizer included."""
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
    """Return the slots and the kept graphs that make the best of a request's memory.

    With each slot more there is room for fewer graphs. As long as loads bound the step it is faster
    with it, and from where visits do it is not: where that begins is found by halving. Of numbers
    of slots that leave room for the same graphs the largest is taken, and the most that there can
    be where graphs would gain little. On a CPU slots come first: there a load slows the visits
    beside it, which the plan does not price.

    Returns:
        The two numbers, or None if the request does not fit at all.
    """
    low, high = needs.fewest_slots, needs.most_slots
    if high is None:
        return None
    most = high, needs.most_graphs(high)
    if needs.machine.device == "cpu" or most[1] == needs.facts.num_layers:
        return most

    rate = min(costs.h2d_bytes_per_s, costs.read_bytes_per_s)  # what is staged is read first
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
