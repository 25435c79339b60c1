"""How device memory is divided, and what leaves it: slots, graphs and outputs of attention.

One more slot saves two loads in every step; one more kept graph saves the recompute of its layer,
and one more output its attention's. Slots pay while loads bound the step, the others while compute
does. The bound R3 says which of the two it is in a fraction of a millisecond; it is within a
thousandth of the simulated time where nothing is sent.

An output is small, and the longer the sequences, the more it saves per byte. Two ways are compared:
graphs first and outputs with the rest, and outputs first and graphs with the rest. Outputs that the
device has no room for may be sent, as many as the host's memory and the link hold.

Whole graphs may be sent too. They are tried before outputs and after them: what saves more per byte
depends on the length of sequences, and either the host's memory or the link ends it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

from offload.plan.fit import MemoryNeeds
from offload.plan.schedule.residency import Residency
from offload.plan.step import pass_s, stashed_bytes
from offload.plan.time.bounds import StepBound
from offload.plan.time.costs import Costs

_Seconds = Callable[[Residency], float]

SAME_FRAC = 1e-6  # times that differ by less are the same
WORTH_FRAC = 0.01  # of the step: smaller gains are not worth a slot, in case the link is slower


def bound_of(needs: MemoryNeeds, costs: Costs, residency: Residency) -> float:
    """Return the lower bound on the time of a request's step, optimizer included."""
    return _bound(needs, costs)(residency)


def _bound(needs: MemoryNeeds, costs: Costs) -> _Seconds:
    """Return the lower bound as a function of the residency, each computed once."""
    request = needs.request
    num_micro_batches = sum(run.rank_micro_batches for run in request.runs)
    saved = costs.saver(num_micro_batches=num_micro_batches)

    @cache
    def step_bound(*, sends: bool) -> StepBound:
        return StepBound.of(
            costs.while_sending() if sends else costs,
            num_micro_batches=num_micro_batches,
            stashed_bytes=stashed_bytes(needs.facts, request),
            is_staged=needs.is_staged,
        )

    @cache
    def bound_s(residency: Residency) -> float:
        bound_s = step_bound(sends=residency.sends).bound_s(
            residency.num_slots,
            num_kept_graphs=residency.num_kept_graphs,
            saved=saved(residency),
        )
        return bound_s + costs.optimizer_s

    return bound_s


def least_s(needs: MemoryNeeds, costs: Costs) -> float | None:
    """Return a time that no residency of a request gets its step below; None if it does not fit.

    That is the longer of two. One is R3 with the most slots and every graph. The other is the time
    of all visits where as many layers as can skip their recompute, and no other layer computes its
    attention again if outputs may be kept or sent.
    """
    num_slots, num_layers = needs.most_slots, needs.facts.num_layers
    if num_slots is None:
        return None
    fewest, has_output = needs.fewest, needs.chooses_outputs
    num_graphs = needs.with_graphs(fewest.num_slots).num_kept_graphs
    num_graphs += needs.most_sent_graphs(fewest) if needs.chooses_sent_graphs else 0
    back_s = [cost.back_s(has_graph=False, has_output=has_output) for cost in costs.layers]
    spared_s = [
        one_s - cost.back_s(has_graph=True)
        for one_s, cost in zip(back_s, costs.layers, strict=True)
    ]
    layers_s = sum(
        cost.forth_s(is_sent=False) + costs.scoring_s(layer) + back_s[layer]
        for layer, cost in enumerate(costs.layers)
    ) - sum(sorted(spared_s, reverse=True)[:num_graphs])
    one_s = costs.fronts_s + layers_s + costs.tails_s + costs.front_backward_s
    num_micro_batches = sum(run.rank_micro_batches for run in needs.request.runs)
    return max(
        num_micro_batches * one_s + costs.objective_s + costs.optimizer_s,
        bound_of(needs, costs, Residency(num_slots=num_slots, num_kept_graphs=num_layers)),
    )


def fastest_residency(needs: MemoryNeeds, costs: Costs) -> Residency | None:
    """Return the residency with which a request's step is fastest.

    Outputs of attention are kept or sent, and graphs sent, only where the step is then faster.

    Returns:
        The residency, or None if the request does not fit at all.
    """
    bound_s = slots_bound_s = _bound(needs, costs)
    if needs.is_staged:  # staged bytes are read first
        rate = min(costs.h2d_bytes_per_s, costs.read_bytes_per_s)
        slots_bound_s = _bound(needs, replace(costs, h2d_bytes_per_s=rate))
    plain = _fastest(needs, slots_bound_s, needs.with_graphs)
    if plain is None:
        return None
    # Graphs that are sent, and outputs of attention, where the bound says that they pay and a
    # simulation confirms it. Sent graphs take much of the host's memory.
    step_s, best, may_be_s = _step(needs, costs), plain, least_s(needs, costs)
    assert may_be_s is not None
    for spend, least_gain in _ways(needs, bound_s):
        if bound_s(best) * (1 - least_gain) <= may_be_s:
            continue
        found = _fastest(needs, slots_bound_s, spend)
        if found is None or needs.is_short(found):
            continue
        is_faster = bound_s(found) < bound_s(best) * (1 - least_gain)
        if is_faster and step_s(found) < step_s(best) * (1 - SAME_FRAC):
            best = found
    return best


def _fastest(
    needs: MemoryNeeds, bound_s: _Seconds, spend: Callable[[int], Residency]
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

    spend = cache(spend)
    while low < high:
        middle = (low + high) // 2
        if bound_s(spend(middle + 1)) < bound_s(spend(middle)) * (1 - SAME_FRAC):
            low = middle + 1
        else:
            high = middle
    if bound_s(spend(low)) >= bound_s(most) * (1 - WORTH_FRAC):
        return most
    fastest = spend(low)
    while _is_same_rest(more := spend(low + 1), fastest):
        fastest, low = more, low + 1
    return fastest


def _is_same_rest(one: Residency, other: Residency) -> bool:
    return replace(one, num_slots=other.num_slots) == other


# ---------------------------------------------------------------------------------------------
# Graphs that are sent, and outputs of attention


def _ways(
    needs: MemoryNeeds, bound_s: _Seconds
) -> Iterator[tuple[Callable[[int], Residency], float]]:
    """Yield ways to spend what slots leave, and what each must gain to be taken."""

    def least(ways: Iterable[Residency]) -> Residency:
        return min(ways, key=bound_s)

    def keeping(num_slots: int) -> Residency:
        return least(_kept(needs, num_slots))

    def sending(num_slots: int) -> Residency:
        reserved = _kept(needs, num_slots, num_sent_outputs=1)  # with room for the buffers
        return least(_with_sent_outputs(needs, bound_s, one) for one in reserved)

    def sending_graphs(num_slots: int) -> Residency:
        reserved = _kept(needs, num_slots, num_sent_graphs=1)
        return least(way for one in reserved for way in _sent_both(needs, bound_s, one))

    if needs.chooses_outputs:
        yield keeping, SAME_FRAC
        if needs.machine.device != "cpu":
            yield sending, SAME_FRAC
    if needs.chooses_sent_graphs:
        yield sending_graphs, WORTH_FRAC


def _kept(
    needs: MemoryNeeds, num_slots: int, *, num_sent_outputs: int = 0, num_sent_graphs: int = 0
) -> Iterator[Residency]:
    """Yield both ways to divide what the slots leave between graphs and outputs."""
    graphs = needs.with_graphs(
        num_slots, num_sent_outputs=num_sent_outputs, num_sent_graphs=num_sent_graphs
    )
    if not needs.chooses_outputs:
        yield graphs
        return
    yield needs.with_outputs(graphs)
    if needs.chooses_graphs:
        yield needs.with_outputs_first(graphs)


def _sent_both(needs: MemoryNeeds, bound_s: _Seconds, kept: Residency) -> Iterator[Residency]:
    """Yield the same with as many sent graphs, and sent outputs, as pay: in either order."""
    graphs = _with_sent_graphs(needs, bound_s, kept)
    if not needs.chooses_outputs:
        yield graphs
        return
    yield _with_sent_outputs(needs, bound_s, graphs)
    outputs = _with_sent_outputs(needs, bound_s, kept)
    yield needs.within_layers(_with_sent_graphs(needs, bound_s, outputs))


def _with_sent_outputs(needs: MemoryNeeds, bound_s: _Seconds, kept: Residency) -> Residency:
    """Return the same with the number of sent outputs at which the link delays the step."""
    most = needs.most_sent(replace(kept, num_sent_outputs=0))
    return _last_faster(lambda num: replace(kept, num_sent_outputs=num), most, bound_s)


def _with_sent_graphs(needs: MemoryNeeds, bound_s: _Seconds, kept: Residency) -> Residency:
    """Return the same with the number of sent graphs at which the link delays the step."""
    most = needs.most_sent_graphs(kept)
    return _last_faster(lambda num: replace(kept, num_sent_graphs=num), most, bound_s)


def _last_faster(sending: Callable[[int], Residency], most: int, bound_s: _Seconds) -> Residency:
    """Return the residency of the last number, up to the most, that is faster than one less."""
    low, high = min(1, most), most
    while low < high:
        middle = (low + high) // 2
        if bound_s(sending(middle + 1)) < bound_s(sending(middle)) * (1 - SAME_FRAC):
            low = middle + 1
        else:
            high = middle
    return sending(low)


def _step(needs: MemoryNeeds, costs: Costs) -> _Seconds:
    """Return the simulated time of a step as a function of the residency, each computed once."""

    @cache
    def step_s(residency: Residency) -> float:
        without_update_s = pass_s(
            needs.facts,
            needs.request,
            costs.given(residency),
            residency,
            is_staged=needs.is_staged,
        )
        return without_update_s + costs.optimizer_s

    return step_s
