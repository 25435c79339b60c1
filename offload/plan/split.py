"""How device memory is divided, and what leaves it: slots, graphs and outputs of attention.

One more slot saves two loads in every step; one more kept graph saves the recompute of its layer,
and one more output its attention's. Slots pay while loads bound the step, the others while compute
does. An output is small, and the longer the sequences, the more it saves per byte; either outputs
or graphs are kept first. What the device has no room for may be sent, as much as the host's memory
and the link hold.

The bound R3 shows about where the best step is, in a fraction of a millisecond. From there on the
step is simulated with more and with fewer slots, until none is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

from offload.plan.fit import MemoryNeeds
from offload.plan.schedule.op import Route
from offload.plan.schedule.schedule import Residency, Saved
from offload.plan.step import Drafts, stashed_bytes
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs

_Spend = Callable[[int], Residency]
"""A way to spend what slots leave: the residency with so many slots."""

SAME_FRAC = 1e-6  # times that differ by less are the same
WORTH_FRAC = 0.01  # of the step: smaller gains are not worth memory, in case a rate is off


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
        needs = self.needs
        if needs.most_slots is None:
            return None
        best = self._with_best_slots(needs.with_graphs)
        further = (
            (self._keeping, SAME_FRAC, needs.chooses_outputs),
            (self._sending, SAME_FRAC, needs.chooses_outputs and needs.may_send),
            (self._sending_graphs, WORTH_FRAC, needs.chooses_sent_graphs),
        )
        for spend, least_gain, is_open in further:
            ways = (self._with_any_slots(cache(spend)), spend(best.num_slots)) if is_open else ()
            plainer = best
            for found in map(self._polished, ways):
                if self._is_faster(found, plainer, least_gain) and self._is_faster(found, best):
                    best = found
        return best

    def _with_best_slots(self, spend: _Spend) -> Residency:
        """Return the number of slots with which a step is fastest, and what the rest is spent on.

        Among numbers of slots that leave room for the same, the largest is taken. If the rest would
        gain less than `WORTH_FRAC`, slots get all the memory. On a CPU slots come first: there a
        load slows concurrent visits, which the plan does not price.
        """
        needs, spend = self.needs, cache(spend)
        most = spend(needs.most_slots or 0)
        if needs.machine.device == "cpu" or most.num_kept_graphs == needs.facts.num_layers:
            return most
        best = self._with_any_slots(spend)
        if self.step_s(best) >= self.step_s(most) * (1 - WORTH_FRAC):
            return most
        for num_slots in self._slots[self._slots.index(best.num_slots) + 1 :]:
            more = spend(num_slots)
            if more[1:] != best[1:]:
                break
            best = more
        return best

    def _with_any_slots(self, spend: _Spend) -> Residency:
        """Return about the fastest way to spend what slots leave.

        Each further slot leaves less room for the rest. A binary search finds the number of slots
        at which the step stops being load-bound; beyond it, memory is better spent on layers that
        skip recomputation.
        """
        low = self._last_faster(spend, self._slots, self._slots_bound_s)
        return self._climbed(low, spend, self._slots)

    @cached_property
    def _slots(self) -> range:
        """The numbers of slots that fit."""
        return range(self.needs.fewest.num_slots, (self.needs.most_slots or 0) + 1)

    def _polished(self, best: Residency) -> Residency:
        """Return the same with the numbers of sent graphs and outputs that are the fastest."""
        for _ in range(2 if best.num_sent_graphs else 0):
            most, num_slots = self.needs.most_sent_graphs(best), best.num_slots
            spend = partial(self._sending, num_slots)
            best = self._climbed(best.num_sent_graphs, spend, range(1, most + 1))
            at = partial(self._sending, num_graphs=best.num_sent_graphs)
            best = self._climbed(num_slots, at, self._slots)
        if best.num_sent_outputs:
            most, kept = self.needs.most_sent(best), best
            best = self._climbed(
                best.num_sent_outputs,
                lambda num: kept._replace(num_sent_outputs=num),
                range(1, most + 1),
            )
        return best

    def _climbed(self, start: int, spend: _Spend, within: range) -> Residency:
        """Return the best way by simulation, from a number on as long as steps are faster."""
        best, number, strides = spend(start), start, [1, -1, 2, -2, 4, -4]
        while strides:
            near = number + strides[0]
            if near in within and self._is_faster(found := spend(near), best):
                best, number, strides = found, near, [strides[0], 2 * strides[0]]
            else:
                del strides[0]
        return best

    def _is_faster(self, found: Residency, best: Residency, least_gain: float = SAME_FRAC) -> bool:
        """Return whether a residency fits, and gains so much over another."""
        most_s = self.step_s(best) * (1 - least_gain)
        if self.bound_s(found) >= most_s or self.needs.is_short(found):
            return False
        return self.step_s(found) < most_s

    # ---------------------------------------------------------------------------------------------
    # Ways to spend what slots leave

    def _kept(
        self, num_slots: int, *, num_outputs: int = 0, num_graphs: int = 0
    ) -> list[Residency]:
        """Keep graphs and outputs of attention, the ones or the others first; with these sent."""
        needs = self.needs
        graphs = needs.with_graphs(
            num_slots, num_sent_outputs=num_outputs, num_sent_graphs=num_graphs
        )
        if not needs.chooses_outputs:
            return [graphs]
        ways = [needs.with_outputs(graphs)]
        return [*ways, needs.with_outputs_first(graphs)] if needs.chooses_graphs else ways

    def _keeping(self, num_slots: int, num_graphs: int = 0) -> Residency:
        return min(self._kept(num_slots, num_graphs=num_graphs), key=self.bound_s)

    def _sending_graphs(self, num_slots: int) -> Residency:
        """Send graphs, keep others in what is left, and send as many again."""
        num_graphs = 1
        for _ in range(2):
            kept = self._keeping(num_slots, num_graphs)
            num_graphs = self._with_sent_graphs(kept).num_sent_graphs
        return self._sending(num_slots, num_graphs)

    def _sending(self, num_slots: int, num_graphs: int = 0) -> Residency:
        """Send so many graphs, and outputs of layers that are left, with room for their buffers."""
        if not self.needs.chooses_outputs:
            return self._keeping(num_slots, num_graphs)
        kept = self._kept(num_slots, num_graphs=num_graphs, num_outputs=0 if num_graphs else 1)
        return min(map(self._with_sent_outputs, kept), key=self.bound_s)

    def _with_sent_outputs(self, kept: Residency) -> Residency:
        """Return the same with the number of sent outputs at which the link delays the step."""
        return self._with_most(
            lambda num: kept._replace(num_sent_outputs=num), self.needs.most_sent(kept)
        )

    def _with_sent_graphs(self, kept: Residency) -> Residency:
        """Return the same with the number of sent graphs at which the link delays the step."""
        return self._with_most(
            lambda num: kept._replace(num_sent_graphs=num), self.needs.most_sent_graphs(kept)
        )

    def _with_most(self, sending: _Spend, most: int) -> Residency:
        numbers = range(min(1, most), most + 1)
        return sending(self._last_faster(sending, numbers, self.bound_s))

    def _last_faster(
        self, spend: _Spend, numbers: range, seconds: Callable[[Residency], float]
    ) -> int:
        """Return the last of some numbers with which a step is faster than with one less."""
        low, high = numbers[0], numbers[-1]
        while low < high:
            middle = (low + high) // 2
            if seconds(spend(middle + 1)) < seconds(spend(middle)) * (1 - SAME_FRAC):
                low = middle + 1
            else:
                high = middle
        return low

    # ---------------------------------------------------------------------------------------------
    # Times

    @cached_property
    def step_s(self) -> Callable[[Residency], float]:
        """The simulated time of a step as a function of the residency, each computed once."""
        needs = self.needs
        drafts = Drafts(
            facts=needs.facts, request=needs.request, costs=self.costs, is_staged=needs.is_staged
        )
        return cache(drafts.step_s)

    @cached_property
    def bound_s(self) -> Callable[[Residency], float]:
        """R3 of a step, optimizer included, as a function of the residency."""
        return self._bound(self.costs)

    @cached_property
    def _slots_bound_s(self) -> Callable[[Residency], float]:
        """The bound by which slots are chosen: staged bytes are read first."""
        speed, read = self.costs.speed(Route.LOAD), self.costs.speed(Route.READ)
        if self.needs.is_staged:
            speed = speed._replace(bytes_per_s=min(speed.bytes_per_s, read.bytes_per_s))
        return self._bound(self.costs.at({Route.LOAD: speed}))

    def _bound(self, costs: Costs) -> Callable[[Residency], float]:
        needs, request = self.needs, self.needs.request
        num = sum([run.round_micro_batches for run in request.runs])
        input_bytes, sending = stashed_bytes(needs.facts, request), costs.while_sending()
        saved: Callable[[Residency], Saved] = costs.saver(num_micro_batches=num)

        @cache
        def bound_s(residency: Residency) -> float:
            one_s = r3_bound_s(
                sending if residency.sends else costs,
                num_slots=residency.num_slots,
                num_micro_batches=num,
                saved=saved(residency),
                stashed_bytes=input_bytes,
                is_staged=needs.is_staged,
            )
            return request.num_rounds * one_s + costs.optimizer_s

        return bound_s
