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

A way is searched with dozens to hundreds of bounds. What it could give at best takes none: the time
of all visits, less what the fewest slots leave room to save. It tells which ways need no search.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from offload.plan.fit import MemoryNeeds
from offload.plan.refusal import Floor
from offload.plan.schedule.schedule import Residency
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """A way to spend what slots leave, after the plainer ones.

    Attributes:
        spend: Gives the residency with so many slots.
        least_gain: What it must gain over the plainer ways to be taken.
        least_s: A time that no residency of this way, or of the plainer ones, gets below.
    """

    spend: Callable[[int], Residency]
    least_gain: float
    least_s: float


@dataclass(frozen=True, kw_only=True)  # no slots: what is read again and again is kept
class Split:
    """The search for the residency with which a request's step is fastest.

    Attributes:
        needs: The request and its memory.
        costs: Of its ops.
    """

    needs: MemoryNeeds
    costs: Costs

    @property
    def fits(self) -> bool:
        """Whether the request fits at all."""
        return self._most_slots is not None

    @cached_property
    def loads_s(self) -> float:
        """A time that a step of a request that fits does not get below: R3 with all that may fit.

        Those are the most slots, and every graph.
        """
        assert self._most_slots is not None
        num_layers = self.needs.facts.num_layers
        return self._bound_s(Residency(num_slots=self._most_slots, num_kept_graphs=num_layers))

    @property
    def least_s(self) -> float:
        """A time that no residency gets a step of a request that fits below."""
        return self._ways[-1].least_s

    @cached_property
    def fastest(self) -> Residency | None:
        """The residency; None if the request does not fit at all.

        Outputs of attention are kept or sent, and graphs sent, only where the step is then faster.
        """
        return self._fastest_of(self._ways) if self.fits else None

    def _fastest_of(self, ways: Sequence[_Way]) -> Residency:
        """Return the best of these ways, the plainest first.

        The last is searched first if it may be better than all that the plainer ones could give.
        """
        *plainer, way = ways
        if not plainer or self._is_faster(way, least_s=plainer[-1].least_s, best=None):
            return self._searched(way)
        best = self._fastest_of(plainer)
        is_faster = self._is_faster(way, least_s=self._bound_s(best), best=best)
        return self._searched(way) if is_faster else best

    def _is_faster(self, way: _Way, *, least_s: float, best: Residency | None) -> bool:
        """Return whether a way is faster than all that takes at least so long, or else the best."""
        may_be_s = least_s * (1 - way.least_gain)
        if way.least_s >= may_be_s:
            return False
        found = self._searched(way)
        if self.needs.is_short(found) or self._bound_s(found) >= may_be_s:
            return False
        same_s = self._step_s(found) / (1 - SAME_FRAC)
        return same_s < least_s or (best is not None and same_s < self._step_s(best))

    @cached_property
    def _searched(self) -> Callable[[_Way], Residency]:
        """The best residency of a way, each found once."""
        assert self._most_slots is not None
        return cache(partial(_fastest, self.needs, self._slots_bound_s, self._most_slots))

    @cached_property
    def _ways(self) -> Sequence[_Way]:
        """The ways of a request that fits, the plainest first."""
        needs, floor = self.needs, Floor.of(self.costs, num_micro_batches=self._num_micro_batches)
        fewest = needs.fewest
        plain = needs.with_graphs(fewest.num_slots)
        least_s = max(self.loads_s, floor.least_s([plain]))
        ways = [_Way(spend=needs.with_graphs, least_gain=0.0, least_s=least_s)]

        def add(spend: Callable[[int], Residency], least_gain: float, visits_s: float) -> None:
            least_s = min(ways[-1].least_s, max(self.loads_s, visits_s))
            ways.append(_Way(spend=spend, least_gain=least_gain, least_s=least_s))

        if needs.chooses_outputs:
            add(self._keeping, SAME_FRAC, floor.least_s(needs.most_kept(fewest)))
        if needs.chooses_outputs and needs.may_send:
            saved = self._with_most_sent(needs.most_kept(fewest._replace(num_sent_outputs=1)))
            if any(one.num_sent_outputs for one in saved):
                saved = [one._replace(num_sent_graphs=0) for one in saved]
                add(self._sending, SAME_FRAC, floor.least_s(saved))
        if needs.chooses_sent_graphs:
            saved = self._with_most_sent(needs.most_kept(fewest._replace(num_sent_graphs=1)))
            if any(one.num_sent_graphs for one in saved):
                add(self._sending_graphs, WORTH_FRAC, floor.least_s(saved))
        return ways

    def _with_most_sent(self, kept: Iterable[Residency]) -> Sequence[Residency]:
        """Return these with all that could be sent of each kind if the other were not.

        That is most with the most kept graphs, whose inputs take no host memory, unless so few
        layers are left that all of them could send.
        """
        kept, needs, fewest = list(kept), self.needs, self.needs.fewest
        if not kept:
            return ()
        last = fewest._replace(num_kept_graphs=kept[-1].num_kept_graphs)
        outputs, graphs = needs.most_sent(last), needs.most_sent_graphs(last)
        if outputs == needs.most_outputs(last):
            outputs = needs.most_outputs(fewest)
        if graphs == needs.facts.num_layers - last.num_kept_graphs:
            graphs = needs.facts.num_layers
        return [one._replace(num_sent_outputs=outputs, num_sent_graphs=graphs) for one in kept]

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
    def _most_slots(self) -> int | None:
        return self.needs.most_slots

    @property
    def _num_micro_batches(self) -> int:
        return sum(run.rank_micro_batches for run in self.needs.request.runs)

    @cached_property
    def _bound_s(self) -> _Seconds:
        return _bound(self.needs, self.costs)

    @cached_property
    def _slots_bound_s(self) -> _Seconds:
        """The bound by which slots are chosen: staged bytes are read first."""
        if not self.needs.is_staged:
            return self._bound_s
        rate = min(self.costs.h2d_bytes_per_s, self.costs.read_bytes_per_s)
        return _bound(self.needs, replace(self.costs, h2d_bytes_per_s=rate))

    @cached_property
    def _step_s(self) -> _Seconds:
        """The simulated time of a step as a function of the residency, each computed once."""
        return cache(partial(draft_step_s, self.needs, self.costs))


def _fastest(needs: MemoryNeeds, bound_s: _Seconds, most_slots: int, way: _Way) -> Residency:
    """Return the number of slots with which a step is fastest, and what the rest is spent on.

    Each further slot leaves less room for the rest. A binary search finds the number of slots at
    which the step stops being load-bound; beyond it, memory is better spent on layers that skip
    recomputation. Among numbers of slots that leave room for the same, the largest is taken. If the
    rest would gain less than `WORTH_FRAC`, slots get all the memory. On a CPU slots come first:
    there a load slows concurrent visits, which the plan does not price.
    """
    low, high, spend = needs.fewest.num_slots, most_slots, cache(way.spend)
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
    while _is_same_rest(more := spend(low + 1), fastest):
        fastest, low = more, low + 1
    return fastest


def _is_same_rest(one: Residency, other: Residency) -> bool:
    return one._replace(num_slots=other.num_slots) == other


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
    most = needs.most_sent(kept._replace(num_sent_outputs=0))
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
