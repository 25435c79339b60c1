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
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from offload.plan.fit import MemoryNeeds
from offload.plan.schedule.schedule import Residency
from offload.plan.step import pass_s, stashed_bytes
from offload.plan.time.bounds import StepBound
from offload.plan.time.costs import Costs

_Seconds = Callable[[Residency], float]
_Spend = Callable[[int], Residency]
"""A way to spend what slots leave: the residency with so many slots."""

SAME_FRAC = 1e-6  # times that differ by less are the same
WORTH_FRAC = 0.01  # of the step: smaller gains are not worth a slot, in case the link is slower


def bound_of(needs: MemoryNeeds, costs: Costs) -> _Seconds:
    """Return the lower bound as a function of the residency, each computed once."""
    request = needs.request
    num_micro_batches = sum(run.round_micro_batches for run in request.runs)
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
        return request.num_rounds * bound_s + costs.optimizer_s

    return bound_s


@dataclass(frozen=True, kw_only=True)  # no slots: what is read again and again is kept
class Split:
    """The search for the residency with which a request's step is fastest."""

    needs: MemoryNeeds  # the request and its memory
    costs: Costs  # the prices of its ops

    @cached_property
    def fastest(self) -> Residency | None:
        """The residency; None if the request does not fit at all.

        Outputs of attention are kept or sent, and graphs sent, only where the step is then faster.
        """
        needs, most_slots = self.needs, self.needs.most_slots
        if most_slots is None:
            return None
        searched = partial(_fastest, needs, self._slots_bound_s, most_slots)
        best = searched(needs.with_graphs)
        further = (
            (self._keeping, SAME_FRAC, needs.chooses_outputs),
            (self._sending, SAME_FRAC, needs.chooses_outputs and needs.may_send),
            (self._sending_graphs, WORTH_FRAC, needs.chooses_sent_graphs),
        )
        for spend, least_gain, is_open in further:
            if is_open and self._is_faster(found := searched(spend), best, least_gain=least_gain):
                best = found
        return best

    def _is_faster(self, found: Residency, best: Residency, *, least_gain: float) -> bool:
        """Return whether a residency fits, and gains so much over a plainer one."""
        if self.needs.is_short(found):
            return False
        is_worth = self._bound_s(found) < self._bound_s(best) * (1 - least_gain)
        return is_worth and self._step_s(found) < self._step_s(best) * (1 - SAME_FRAC)

    def _least(self, ways: Iterable[Residency]) -> Residency:
        return min(ways, key=self._bound_s)

    def _keeping(self, num_slots: int) -> Residency:
        return self._least(_kept(self.needs, num_slots))

    def _sending(self, num_slots: int) -> Residency:
        reserved = _kept(self.needs, num_slots, num_sent_outputs=1)  # with room for the buffers
        return self._least(_with_sent_outputs(self.needs, self._bound_s, one) for one in reserved)

    def _sending_graphs(self, num_slots: int) -> Residency:
        reserved = _kept(self.needs, num_slots, num_sent_graphs=1)
        return self._least(
            way for one in reserved for way in _sent_both(self.needs, self._bound_s, one)
        )

    @cached_property
    def _bound_s(self) -> _Seconds:
        return bound_of(self.needs, self.costs)

    @cached_property
    def _slots_bound_s(self) -> _Seconds:
        """The bound by which slots are chosen: staged bytes are read first."""
        if not self.needs.is_staged:
            return self._bound_s
        rate = min(self.costs.h2d_bytes_per_s, self.costs.read_bytes_per_s)
        return bound_of(self.needs, replace(self.costs, h2d_bytes_per_s=rate))

    @cached_property
    def _step_s(self) -> _Seconds:
        """The simulated time of a step as a function of the residency, each computed once."""
        return cache(partial(draft_step_s, self.needs, self.costs))


def _fastest(needs: MemoryNeeds, bound_s: _Seconds, most_slots: int, spend: _Spend) -> Residency:
    """Return the number of slots with which a step is fastest, and what the rest is spent on.

    Each further slot leaves less room for the rest. A binary search finds the number of slots at
    which the step stops being load-bound; beyond it, memory is better spent on layers that skip
    recomputation. Among numbers of slots that leave room for the same, the largest is taken. If the
    rest would gain less than `WORTH_FRAC`, slots get all the memory. On a CPU slots come first:
    there a load slows concurrent visits, which the plan does not price.
    """
    low, high, spend = needs.fewest.num_slots, most_slots, cache(spend)
    most = spend(high)
    if needs.machine.device == "cpu" or most.num_kept_graphs == needs.facts.num_layers:
        return most
    while low < high:
        middle = (low + high) // 2
        if bound_s(spend(middle + 1)) < bound_s(spend(middle)) * (1 - SAME_FRAC):
            low = middle + 1
        else:
            high = middle
    if bound_s(spend(low)) >= bound_s(most) * (1 - WORTH_FRAC):
        return most
    fastest = spend(low)
    while (more := spend(low + 1))._replace(num_slots=fastest.num_slots) == fastest:
        fastest, low = more, low + 1
    return fastest


# ---------------------------------------------------------------------------------------------
# Graphs that are sent, and outputs of attention


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
    most = needs.most_sent(kept)
    return _last_faster(lambda num: kept._replace(num_sent_outputs=num), most, bound_s)


def _with_sent_graphs(needs: MemoryNeeds, bound_s: _Seconds, kept: Residency) -> Residency:
    """Return the same with the number of sent graphs at which the link delays the step."""
    most = needs.most_sent_graphs(kept)
    return _last_faster(lambda num: kept._replace(num_sent_graphs=num), most, bound_s)


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


def draft_step_s(needs: MemoryNeeds, costs: Costs, residency: Residency) -> float:
    """Return the predicted time of a step, optimizer included, without all of its ops."""
    without_update_s = pass_s(
        needs.facts,
        needs.request,
        costs.given(residency),
        residency,
        is_staged=needs.is_staged,
    )
    return without_update_s + costs.optimizer_s
