"""How device memory is divided between slots, kept graphs and kept outputs of attention.

One more slot saves two loads in every step; one more kept graph saves the recompute of its layer,
and one more output its attention's. Slots pay while loads bound the step, the others while compute
does. The bound R3 says which of the two it is in a fraction of a millisecond; it is within a
thousandth of the simulated time where nothing is sent.

An output is small, and the longer the sequences, the more it saves per byte. Two ways are compared:
graphs first and outputs with the rest, and outputs first and graphs with the rest. Outputs that the
device has no room for may be sent, as many as the host's memory and the link hold.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from offload.plan.fit import MemoryNeeds
from offload.plan.memory.memory import input_bytes
from offload.plan.schedule.residency import Residency
from offload.plan.step import Draft
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs

SAME_FRAC = 1e-6  # times that differ by less are the same
WORTH_FRAC = 0.01  # of the step: smaller gains are not worth a slot, in case the link is slower


def bound_of(needs: MemoryNeeds, costs: Costs, residency: Residency) -> float:
    """Return the lower bound on the time of a request's step, optimizer included."""
    request, costs = needs.request, costs.given(residency)
    num_micro_batches = request.rank_micro_batches
    bound_s = r3_bound_s(
        costs,
        num_slots=residency.num_slots,
        num_micro_batches=num_micro_batches,
        stashed_bytes=input_bytes(needs.facts, request.typical) if request.is_stashed else 0,
        num_kept_graphs=residency.num_kept_graphs,
        saved=costs.saved(residency, num_micro_batches=num_micro_batches),
        is_staged=needs.is_staged,
    )
    return bound_s + costs.optimizer_s


def fastest_residency(needs: MemoryNeeds, costs: Costs) -> Residency | None:
    """Return the residency with which a request's step is fastest.

    Outputs of attention are kept or sent only where the step is then faster.

    Returns:
        The residency, or None if the request does not fit at all.
    """
    plain = _fastest(needs, costs, needs.with_graphs)
    if plain is None or not needs.chooses_outputs:
        return plain
    return _with_outputs(needs, costs, plain)


def _fastest(
    needs: MemoryNeeds, costs: Costs, spend: Callable[[int], Residency]
) -> Residency | None:
    """Return the number of slots with which a step is fastest, and what the rest is spent on.

    Each further slot leaves less room for the rest. A binary search finds the number of slots at
    which the step stops being load-bound; beyond it, memory is better spent on layers that skip
    recomputation. Among numbers of slots that leave room for the same, the largest is taken. If the
    rest would gain less than `WORTH_FRAC`, slots get all the memory. On a CPU slots come first:
    there a load slows concurrent visits, which the plan does not price.
    """
    low, high = needs.fewest.num_slots, needs.most_slots
    if high is None:
        return None
    most = spend(high)
    if needs.machine.device == "cpu" or most.num_kept_graphs == needs.facts.num_layers:
        return most

    rate = min(costs.h2d_bytes_per_s, costs.read_bytes_per_s)  # staged bytes are read first
    at = replace(costs, h2d_bytes_per_s=rate) if needs.is_staged else costs

    def bound_s(num_slots: int) -> float:
        return bound_of(needs, at, spend(num_slots))

    while low < high:
        middle = (low + high) // 2
        if bound_s(middle + 1) < bound_s(middle) * (1 - SAME_FRAC):
            low = middle + 1
        else:
            high = middle
    if bound_s(low) >= bound_s(most.num_slots) * (1 - WORTH_FRAC):
        return most
    fastest = spend(low)
    while _is_same_rest(more := spend(low + 1), fastest):
        fastest, low = more, low + 1
    return fastest


def _is_same_rest(one: Residency, other: Residency) -> bool:
    return replace(one, num_slots=other.num_slots) == other


# ---------------------------------------------------------------------------------------------
# Outputs of attention


def _with_outputs(needs: MemoryNeeds, costs: Costs, plain: Residency) -> Residency:
    """Return the fastest residency that keeps or sends outputs, or the plain one if none is faster.

    The bound chooses; a simulation confirms that the step is faster.
    """

    def keeping(num_slots: int) -> Residency:
        return min(_kept(needs, num_slots), key=lambda one: bound_of(needs, costs, one))

    def sending(num_slots: int) -> Residency:
        reserved = _kept(needs, num_slots, num_sent_outputs=1)  # with room for the buffers
        ways = (_sent(needs, costs, one) for one in reserved)
        return min(ways, key=lambda one: bound_of(needs, costs, one))

    ways = [keeping] if needs.machine.device == "cpu" else [keeping, sending]
    best, best_s = plain, bound_of(needs, costs, plain)
    for spend in ways:
        found = _fastest(needs, costs, spend)
        if found is None or needs.shortages(found):
            continue
        found_s = bound_of(needs, costs, found)
        if found_s < best_s * (1 - SAME_FRAC) and _is_faster(needs, costs, found, best):
            best, best_s = found, found_s
    return best


def _kept(needs: MemoryNeeds, num_slots: int, *, num_sent_outputs: int = 0) -> Iterator[Residency]:
    """Yield both ways to divide what the slots leave between graphs and outputs."""
    graphs = needs.with_graphs(num_slots, num_sent_outputs=num_sent_outputs)
    yield needs.with_outputs(graphs)
    if needs.chooses_graphs:
        yield needs.with_outputs_first(graphs)


def _sent(needs: MemoryNeeds, costs: Costs, kept: Residency) -> Residency:
    """Return the same with the number of sent outputs at which the link delays the step."""
    low, high = 1, needs.most_sent(kept)
    if not high:
        return replace(kept, num_sent_outputs=0)

    def bound_s(num: int) -> float:
        return bound_of(needs, costs, replace(kept, num_sent_outputs=num))

    while low < high:
        middle = (low + high) // 2
        if bound_s(middle + 1) < bound_s(middle) * (1 - SAME_FRAC):
            low = middle + 1
        else:
            high = middle
    return replace(kept, num_sent_outputs=low)


def _is_faster(needs: MemoryNeeds, costs: Costs, one: Residency, other: Residency) -> bool:
    def step_s(residency: Residency) -> float:
        draft = Draft.of(
            needs.facts,
            needs.request,
            costs.given(residency),
            residency,
            is_staged=needs.is_staged,
        )
        return draft.step_s(needs.request.rank_micro_batches) + costs.optimizer_s

    return step_s(one) < step_s(other) * (1 - SAME_FRAC)
